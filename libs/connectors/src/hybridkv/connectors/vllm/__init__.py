"""The vLLM plugin. vLLM calls `register` in every one of its processes, so this module imports next to nothing."""

CONNECTOR = "HybridOffloadConnector"
MODULE = "hybridkv.connectors.vllm.offload"


def register() -> None:
    """Makes HybridOffloadConnector known to vLLM by its class name. Calling it again changes nothing.

    Raises:
        ConfigurationError: something else holds that name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
        return
    # vLLM keeps a function that imports the class; calling it would import all of the connector in every process.
    loader = KVConnectorFactory._registry[CONNECTOR]
    module = next(
        (cell.cell_contents for cell in loader.__closure__ or () if "." in str(cell.cell_contents)), "unknown"
    )
    if module != MODULE:
        from hybridkv.connectors.errors import ConfigurationError

        raise ConfigurationError(
            "vllm.general_plugins",
            f"{CONNECTOR} to be registered by {MODULE}",
            f"a connector of that name from {module}",
            "uninstall the other plugin, or choose plugins with VLLM_PLUGINS",
        )
