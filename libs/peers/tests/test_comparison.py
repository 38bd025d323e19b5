"""Comparison of two descriptions: which differences are allowed, and which field a refusal names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_worlds import World, worlds
from plain_worlds import engine, group

from hybridkv.peers import description
from hybridkv.peers.comparison import Agreement, compare
from hybridkv.peers.description import Axis, Description, GroupDescription, LayerDescription, Piece
from hybridkv.peers.errors import Incompatibility
from hybridkv.planner import GroupKind, GroupSpec

FULL = group(GroupKind.FULL, (16, 16))
WINDOW = group(GroupKind.WINDOW, (16, 16), window_tokens=24)
OURS = engine((FULL, WINDOW), 0, 8)


def changed(value: Any, path: str, new: Any) -> Any:
    """A copy of a description with one field, given by its path, replaced."""
    head, _, rest = path.partition(".")
    if head.isdigit():
        items = list(value)
        items[int(head)] = changed(items[int(head)], rest, new) if rest else new
        return tuple(items)
    return msgspec.structs.replace(value, **{head: changed(getattr(value, head), rest, new) if rest else new})


def test_equal_descriptions_agree() -> None:
    assert isinstance(compare(OURS, OURS), Agreement)


@pytest.mark.parametrize(
    ("path", "new", "field"),
    [
        ("protocol", 2, "protocol"),
        ("facts", {"model.name": "other"}, "facts[model.name]"),
        ("groups", OURS.groups[:1], "number of groups"),
        ("groups.1.spec", GroupSpec(GroupKind.FULL, 16), "groups[1].kind"),
        ("groups.1.spec", GroupSpec(GroupKind.WINDOW, 16, window_tokens=25), "groups[1].window_tokens"),
        ("groups.0.spec", GroupSpec(GroupKind.FULL, 16, lookahead_tokens=1), "groups[0].lookahead_tokens"),
        ("groups.0.layers.0.name", "other", "groups[0].layers"),
        ("groups.0.layers", OURS.groups[0].layers * 2, "groups[0].layers"),
        ("groups.0.layers.0.item_format", "fp8", "groups[0].layer.item_format"),
        ("groups.0.layers.0.pieces", OURS.groups[0].layers[0].pieces * 2, "groups[0].layer.pieces"),
        ("groups.0.layers.0.pieces.0.item_bytes", 1, "groups[0].layer.pieces[0].item_bytes"),
        ("groups.0.layers.0.pieces.0.total_heads", 1, "groups[0].layer.pieces[0].total_heads"),
        ("tp_size", 2, "groups[0].layer.pieces[0]: not split by heads, tp_size"),
    ],
)
def test_a_refusal_names_the_field_that_differs(path: str, new: Any, field: str) -> None:
    refusal = compare(OURS, changed(OURS, path, new))
    assert isinstance(refusal, Incompatibility)
    assert refusal.field == field
    assert refusal.hint
    assert refusal.field in str(refusal)


def blocks(
    ours: int, theirs: int, units: tuple[int, int], kind: GroupKind = GroupKind.FULL
) -> Agreement | Incompatibility:
    options = {"align_tokens": 32} if kind is GroupKind.CHUNKED else {}
    return compare(
        engine((group(kind, (ours, theirs), unit_tokens=units[0], **options),), 0, 8),
        engine((group(kind, (ours, theirs), unit_tokens=units[1], **options),), 1, 8),
    )


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.CHUNKED])
@pytest.mark.parametrize(("ours", "theirs"), [(16, 64), (64, 16), (16, 16)])
def test_blocks_that_can_be_split_need_not_be_equal(kind: GroupKind, ours: int, theirs: int) -> None:
    found = blocks(ours, theirs, (1, 1), kind)
    assert isinstance(found, Agreement)
    assert found.groups[0].cell_tokens == 16


def test_blocks_that_cannot_be_split_must_be_equal() -> None:
    """For an engine that packs the tokens of a block in its own way."""
    refusal = blocks(128, 64, (128, 64))
    assert isinstance(refusal, Incompatibility)
    assert refusal.field == "groups[0].layer.pieces[0].unit_tokens (smallest number of tokens that can move)"
    assert "same block size" in refusal.hint
    assert isinstance(blocks(64, 64, (64, 64)), Agreement)


def test_blocks_where_neither_size_divides_the_other_are_refused() -> None:
    refusal = blocks(24, 16, (1, 1))
    assert isinstance(refusal, Incompatibility)
    assert refusal.field == "groups[0].block_tokens"


def test_a_state_is_exchanged_between_blocks_of_any_sizes() -> None:
    assert isinstance(blocks(640, 528, (1, 1), GroupKind.RECURRENT), Agreement)


def test_heads_that_cannot_be_split_equally_are_refused() -> None:
    def rank(tp_size: int, heads: int) -> Description:
        piece = Piece(0, 0, 8, 1, heads=Axis(heads, 1), total_heads=6)
        layers = (LayerDescription("layer", "plain", (piece,)),)
        return Description(1, "engine", {}, 0, tp_size, 4, (32,), (GroupDescription(GroupSpec("full", 4), layers),))

    assert isinstance(compare(rank(2, 3), rank(6, 1)), Agreement)
    with pytest.raises(ValueError, match="no equal part of 6 heads"):
        rank(4, 1)


@settings(max_examples=examples(50), deadline=None)
@given(worlds())
def test_an_encoded_description_compares_like_the_original(world: World) -> None:
    ours, theirs = world.ours[0], world.theirs[0]
    there = description.decode(description.encode(ours))
    assert isinstance(there, Description)
    assert there == ours
    assert compare(there, theirs) == compare(ours, theirs)


# Decoding is bounded.


@pytest.mark.parametrize(
    ("path", "new", "field"),
    [
        ("engine", "", "engine"),
        ("engine", "x" * (description.MAX_TEXT + 1), "engine"),
        ("facts", {"": "x"}, "name of a fact"),
        ("rank", 1, "rank"),
        ("tp_size", 0, "tp_size"),
        ("num_blocks", 0, "num_blocks"),
        ("num_blocks", 9, "its end"),
        ("region_bytes", (), "number of regions"),
        ("region_bytes", (1 << 60,), "region_bytes"),
        ("groups", (), "number of groups"),
        ("groups.0.layers", (), "number of layers"),
        ("groups.0.layers.0.name", "", "name"),
        ("groups.0.layers.0.pieces", (), "number of pieces"),
        ("groups.0.layers.0.pieces.0.region", 1, "region"),
        ("groups.0.layers.0.pieces.0.offset_bytes", 1, "its end"),
        ("groups.0.layers.0.pieces.0.offset_bytes", -1, "offset_bytes"),
        ("groups.0.layers.0.pieces.0.units", Axis(15, 2), "equal parts of a block"),
        ("groups.0.layers.0.pieces.0.units", Axis(16, 1), "units.stride_bytes"),
        ("groups.0.layers.0.pieces.0.rows", Axis(1 << 40, 1), "items in a block"),
        ("groups.0.layers.0.pieces.0.total_heads", 2, "heads"),
    ],
)
def test_a_contradictory_description_is_refused_by_name(path: str, new: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field.replace("[", r"\[")):
        changed(OURS, path, new)


PLAIN = msgspec.json.decode(msgspec.json.encode(OURS))


def mutated(value: Any, data: st.DataObject) -> Any:
    """The same data with one value replaced."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: mutated(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 5)):
        index = data.draw(st.integers(0, len(value) - 1))
        return [*value[:index], mutated(value[index], data), *value[index + 1 :]]
    odd = st.one_of(st.integers(-1, 1 << 62), st.none(), st.text(max_size=3), st.booleans(), st.floats())
    return data.draw(st.one_of(odd, st.lists(odd, max_size=3)))


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_any_decoded_description_can_be_compared_or_is_an_error(data: st.DataObject) -> None:
    theirs = description.decode(msgspec.json.encode(mutated(PLAIN, data)))
    if isinstance(theirs, Incompatibility):
        assert theirs.field == "description"
        return
    assert isinstance(compare(OURS, theirs), Agreement | Incompatibility)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_invalid_bytes_are_refused(data: bytes) -> None:
    assert isinstance(description.decode(data), Incompatibility)
    whole = description.encode(OURS)
    assert isinstance(description.decode(whole[: len(data)]), Incompatibility)


def test_a_description_that_is_too_long_is_not_decoded() -> None:
    refusal = description.decode(description.encode(OURS) + b" " * description.MAX_ENCODED_BYTES)
    assert isinstance(refusal, Incompatibility)
    assert "at most" in refusal.ours
