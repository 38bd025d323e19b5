"""Plugin of vLLM. vLLM calls `register` in each of its processes, so this module imports almost nothing."""

CONNECTOR = "HybridOffloadConnector"
MULTI_CONNECTOR = "HybridMultiConnector"
PEER_CONNECTOR = "HybridNixlConnector"
LMCACHE_CONNECTOR = "HybridLMCacheConnector"
MODULES = {
    CONNECTOR: "hybridkv.connectors.vllm.offload.connector",
    MULTI_CONNECTOR: "hybridkv.connectors.vllm.multi.connector",
    PEER_CONNECTOR: "hybridkv.connectors.vllm.nixl.connector",
    LMCACHE_CONNECTOR: "hybridkv.connectors.vllm.lmcache.connector",
}


def register() -> None:
    """Registers the connectors with vLLM by their class names. A second call changes nothing.

    Raises:
        ConfigurationError: another plugin has registered one of the names.
    """
    for connector, module in MODULES.items():
        _register(connector, module)


def _register(connector: str, module: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if connector not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(connector, module, connector)
        return
    # vLLM's registry has a function that imports the class. A call would import the whole connector in every process.
    loader = KVConnectorFactory._registry[connector]
    found = next((cell.cell_contents for cell in loader.__closure__ or () if "." in str(cell.cell_contents)), "unknown")
    if found != module:
        from hybridkv.connectors.errors import ConfigurationError

        raise ConfigurationError(
            "vllm.general_plugins",
            f"{connector} to be registered by {module}",
            f"a connector of that name from {found}",
            "uninstall the other plugin, or choose plugins with VLLM_PLUGINS",
        )
