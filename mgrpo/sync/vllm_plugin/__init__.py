"""vLLM's end of the weight sync, which vLLM itself loads (entry point `vllm.general_plugins`) in each of its processes."""

from mgrpo.sync.vllm_plugin.transfer_engine import register

__all__ = ["register"]
