"""The vLLM plugin. vLLM calls `register` in every one of its processes, so this module imports next to nothing."""

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
    """Makes the connectors known to vLLM by their class names. Calling it again changes nothing.

    Raises:
        ConfigurationError: something else holds one of the names.
    """
    for connector, module in MODULES.items():
        _register(connector, module)


def _register(connector: str, module: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if connector not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(connector, module, connector)
        return
    # vLLM keeps a function that imports the class; calling it would import all of the connector in every process.
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
