import subprocess
import sys

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR, register


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {name: loader for name, loader in KVConnectorFactory._registry.items() if name != CONNECTOR}
    monkeypatch.setattr(KVConnectorFactory, "_registry", without)


def test_the_connector_is_found_by_its_class_name() -> None:
    register()
    found = KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    assert found.__name__ == CONNECTOR


def test_registering_again_changes_nothing() -> None:
    register()
    before = dict(KVConnectorFactory._registry)
    register()
    assert before == KVConnectorFactory._registry


def test_another_connector_of_the_same_name_is_refused() -> None:
    KVConnectorFactory.register_connector(CONNECTOR, "somebody.else", CONNECTOR)
    with pytest.raises(ConfigurationError) as caught:
        register()
    assert "somebody.else" in str(caught.value) and "VLLM_PLUGINS" in caught.value.hint


def test_registering_twice_does_not_import_the_connector() -> None:
    program = (
        "import sys; from hybridkv.connectors.vllm import register, MODULE; register(); register();"
        "sys.exit(MODULE in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
