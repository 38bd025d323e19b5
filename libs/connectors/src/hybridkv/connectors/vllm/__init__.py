"""The vLLM plugin. vLLM calls `register` in every one of its processes, so this module imports next to nothing."""

CONNECTOR = "HybridOffloadConnector"
_MODULE = "hybridkv.connectors.vllm.offload"


def register() -> None:
    """Makes HybridOffloadConnector known to vLLM by its class name. Calling it again changes nothing.

    Raises:
        ConfigurationError: something else holds that name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, _MODULE, CONNECTOR)
        return
    holder = KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    if holder.__module__ != _MODULE:
        from hybridkv.connectors.errors import ConfigurationError

        raise ConfigurationError(
            "vllm.general_plugins",
            f"{CONNECTOR} to be registered by {_MODULE}",
            f"a class of that name from {holder.__module__}",
            "uninstall the other plugin, or choose plugins with VLLM_PLUGINS",
        )
