"""Twenty bugs for product code, one changed line each, chosen by hand over all libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_PLANNER: Final = "libs/planner/src/hybridkv/planner"
_HASHING: Final = "libs/hashing/src/hybridkv/hashing"
_CANONICAL: Final = "libs/canonical/src/hybridkv/canonical"
_TIERS: Final = "libs/tiers/src/hybridkv/tiers"
_PEERS: Final = "libs/peers/src/hybridkv/peers"
_LMCACHE: Final = "libs/lmcache/src/hybridkv/lmcache"
_CONNECTORS: Final = "libs/connectors/src/hybridkv/connectors/vllm"
_METRICS: Final = "libs/metrics/src/hybridkv/metrics"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A line of product code, and a wrong line to replace it."""

    name: str
    path: str
    """Relative to the root of the tree."""
    line: str
    """Without leading and trailing spaces. The file has exactly one such line."""
    wrong: str
    tests: str
    """The Bazel targets that should fail. All other tests run only if these pass."""

    def applied(self, source: str) -> str:
        """Return the file's text with the wrong line. Raises ValueError unless the right line occurs exactly once."""
        lines = source.split("\n")
        places = [place for place, line in enumerate(lines) if line.strip() == self.line]
        if len(places) != 1:
            raise ValueError(f"{self.name}: {self.path} has {len(places)} lines {self.line!r}, not one")
        lines[places[0]] = lines[places[0]].replace(self.line, self.wrong)
        return "\n".join(lines)


MUTANTS: Final = (
    Mutant(
        "a window a token short",
        f"{_PLANNER}/coverage.py",
        "return max(0, num_tokens - (group.window_tokens - 1))",
        "return max(0, num_tokens - (group.window_tokens - 2))",
        "//libs/planner/...",
    ),
    Mutant(
        "a hit that leaves no token to compute",
        f"{_PLANNER}/hit.py",
        "return max(0, num_tokens - max(1, spec.lookahead_tokens)) // spec.boundary_tokens * spec.boundary_tokens",
        "return max(0, num_tokens - spec.lookahead_tokens) // spec.boundary_tokens * spec.boundary_tokens",
        "//libs/planner/...",
    ),
    Mutant(
        "a prefill stop after the point where two prompts differ",
        f"{_PLANNER}/checkpoints/placement.py",
        "junction = prompt.junction_tokens // boundary_tokens * boundary_tokens",
        "junction = -(-prompt.junction_tokens // boundary_tokens) * boundary_tokens",
        "//libs/planner/...",
    ),
    Mutant(
        "keys without the adapter",
        f"{_HASHING}/keys.py",
        "self._digest = blake3(self._digest + adapter, derive_key_context=_ADAPTER_CONTEXT).digest()",
        "self._digest = blake3(self._digest, derive_key_context=_ADAPTER_CONTEXT).digest()",
        "//libs/hashing/...",
    ),
    Mutant(
        "hashes without the preceding blocks",
        f"{_HASHING}/tokens.py",
        "parent = hashes[-1] if hashes else bytes(HASH_BYTES)",
        "parent = bytes(HASH_BYTES)",
        "//libs/hashing/...",
    ),
    Mutant(
        "page padding in the wrong place",
        f"{_CANONICAL}/pages.py",
        "zeros_before = np.repeat(np.cumsum(taken - content) - (taken - content), [len(page) for page in pages])",
        "zeros_before = np.repeat(np.cumsum(taken - content), [len(page) for page in pages])",
        "//libs/canonical/...",
    ),
    Mutant(
        "a disk record whose checksum is not checked",
        f"{_TIERS}/disk/format/segment.py",
        "if payload_checksum != found.payload_checksum:",
        "if len(payload_checksum) != len(found.payload_checksum):",
        "//libs/tiers:tiers_test",
    ),
    Mutant(
        "the older of two records after a restart",
        f"{_TIERS}/disk/recovery/recovery.py",
        "if before is None or before.address < found.address:",
        "if before is None:",
        "//libs/tiers:tiers_test",
    ),
    Mutant(
        "an object with any seal is accepted",
        f"{_TIERS}/object/format/seals.py",
        "return hmac.compare_digest(seal, self.of(*parts, views=views))",
        "return len(seal) == SEAL_BYTES",
        "//libs/tiers:tiers_test",
    ),
    Mutant(
        "a record is valid in any object",
        f"{_TIERS}/object/format/record.py",
        'return f"{self.object_name}@{self.offset}".encode()',
        'return f"@{self.offset}".encode()',
        "//libs/tiers:tiers_test",
    ),
    Mutant(
        "a block id after the last block",
        "csrc/cpu/lowering.cc",
        "if (id < 0 || id >= pages.num_blocks) {",
        "if (id < 0 || id > pages.num_blocks) {",
        "//csrc/... //libs/transfer/...",
    ),
    Mutant(
        "memory is reused while one load reads it",
        "csrc/ledger/basic_ledger.h",
        "} else if (entry.num_pins > 0) {",
        "} else if (entry.num_pins > 1) {",
        "//csrc/...",
    ),
    Mutant(
        "copies are joined across a gap",
        "csrc/cpu/lowering.cc",
        "return !is_parted_ && source == next_source_ && destination == next_destination_;",
        "return !is_parted_ && (source == next_source_ || destination == next_destination_);",
        "//csrc/... //libs/transfer/...",
    ),
    Mutant(
        "a lease is valid after it expired",
        f"{_PEERS}/leases.py",
        "if type(state) is _Held and state.lease == lease and now_s < state.expires_s:",
        "if type(state) is _Held and state.lease == lease:",
        "//libs/peers:peers_test",
    ),
    Mutant(
        "a peer without the secret is admitted",
        f"{_PEERS}/control/curve.py",
        'status = b"200" if hmac.compare_digest(client_key, self._admitted) else b"400"',
        'status = b"200"',
        "//libs/peers:peers_test",
    ),
    Mutant(
        "a window a block short at LMCache",
        f"{_LMCACHE}/geometry.py",
        "return max(1, -(-(spec.window_tokens - 1) // block)) * block",
        "return max(1, (spec.window_tokens - 1) // block) * block",
        "//libs/lmcache:lmcache_test",
    ),
    Mutant(
        "states that the engine recorded under a wrong block",
        f"{_CONNECTORS}/common/blocks/corrupt_blocks.py",
        "states = [State(*state) for state in handed_over if not self.is_corrupt(state[1])]",
        "states = [State(*state) for state in handed_over]",
        "//libs/connectors:connectors_test",
    ),
    Mutant(
        "such states are handed to connectors of other projects",
        f"{_CONNECTORS}/multi/connector.py",
        "if not misfiled or isinstance(child, ConnectorBase):",
        "if not misfiled or child is not None:",
        "//tests/oracle:oracle_test",
    ),
    Mutant(
        "the prefix of a failed load is still offered",
        f"{_CONNECTORS}/offload/loads/loads_in_flight.py",
        "doubted = culprits | set(self._prefix_keys(in_flight))",
        "doubted = set(culprits)",
        "//libs/connectors:connectors_test",
    ),
    Mutant(
        "counts are reported twice",
        f"{_METRICS}/counts.py",
        "taken._counters, self._counters = self._counters, {}",
        "taken._counters = self._counters",
        "//libs/metrics/...",
    ),
)


__all__ = ["MUTANTS", "Mutant"]
