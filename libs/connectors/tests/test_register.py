import subprocess
import sys

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR, MODULES, MULTI_CONNECTOR, PEER_CONNECTOR, register


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {name: loader for name, loader in KVConnectorFactory._registry.items() if name not in MODULES}
    monkeypatch.setattr(KVConnectorFactory, "_registry", without)


@pytest.mark.parametrize("name", [CONNECTOR, MULTI_CONNECTOR, PEER_CONNECTOR])
def test_a_connector_is_found_by_its_class_name(name: str) -> None:
    register()
    assert KVConnectorFactory.get_connector_class_by_name(name).__name__ == name


def test_registering_again_changes_nothing() -> None:
    register()
    before = dict(KVConnectorFactory._registry)
    register()
    assert before == KVConnectorFactory._registry


@pytest.mark.parametrize("name", [CONNECTOR, MULTI_CONNECTOR, PEER_CONNECTOR])
def test_another_connector_with_the_same_name_is_refused(name: str) -> None:
    KVConnectorFactory.register_connector(name, "somebody.else", name)
    with pytest.raises(ConfigurationError) as caught:
        register()
    assert "somebody.else" in str(caught.value) and "VLLM_PLUGINS" in caught.value.hint


@pytest.mark.full
def test_registering_twice_imports_no_connector() -> None:
    program = (
        "import sys; from hybridkv.connectors.vllm import register, MODULES; register(); register();"
        "sys.exit(any(module in sys.modules for module in MODULES.values()))"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
