"""How long a step takes, by a stated model, and the constants it is given.

    seconds = overhead + max(weights / bandwidth, tokens * 2 * parameters / flops)
                       + context tokens * bytes per token / bandwidth + bytes moved / link

The weights are read once a step and serve all its tokens; each row reads the keys and values of its
context once; each token takes two operations a parameter (the arithmetic of attention itself is
left out: under 3 % at a thousand tokens of context). Bandwidth and flops are the machine's peak
times `efficiency`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Preset:
    """A machine and a model on it; all constants of the simulation.

    Attributes:
        bandwidth: peak bytes a second to and from memory.
        flops: peak operations a second in 16 bits.
        link: bytes a second to the host's memory, for swapping.
        efficiency: what is reached of bandwidth and flops.
        overhead: seconds a step takes beside that.
        parameters: of the model, 2 bytes each.
        layers, kv_heads, head_dim: of the model; keys and values take 2 bytes each.
        window: the longest request the model takes, in tokens.
        memory: bytes for keys and values.
        source: where the constants come from.
    """

    name: str
    bandwidth: float
    flops: float
    link: float
    efficiency: float
    overhead: float
    parameters: float
    layers: int
    kv_heads: int
    head_dim: int
    window: int
    memory: int
    source: str

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def slots(self) -> int:
        """Tokens whose keys and values fit into the memory."""
        return self.memory // self.bytes_per_token

    def step_seconds(self, tokens: int, context_tokens: int, moved_tokens: int = 0) -> float:
        """A step's time.

        Args:
            tokens: computed in the step, prompts and answers.
            context_tokens: attended to, summed over the rows.
            moved_tokens: whose keys and values go to or come from the host's memory.
        """
        bandwidth = self.bandwidth * self.efficiency
        weights = 2 * self.parameters / bandwidth
        compute = tokens * 2 * self.parameters / (self.flops * self.efficiency)
        return (
            self.overhead
            + max(weights, compute)
            + context_tokens * self.bytes_per_token / bandwidth
            + moved_tokens * self.bytes_per_token / self.link
        )


_EFFICIENCY = (
    "Efficiency 0.6 and overhead 5 ms are assumed so that a step takes 45 ms at the paper's "
    "operating point: by Little's law 30.42 requests in flight at 2 a second stay 15.2 s each, "
    "for 338 tokens (sections 6.1, 6.2)."
)
_A100 = Preset(
    name="a100-opt13b",
    bandwidth=1555e9,
    flops=312e12,
    link=32e9,
    efficiency=0.6,
    overhead=0.005,
    parameters=13e9,
    layers=40,
    kv_heads=40,
    head_dim=128,
    window=2048,
    memory=15_700 * 819_200,
    source="A100 40 GB: 1,555 GB/s, 312 Tflop/s in 16 bits, PCIe 4 with 32 GB/s each way (NVIDIA "
    "A100 data sheet). OPT-13B: 13 billion parameters, 40 layers, hidden size 5,120 (Zhang et al. "
    "2022, Table 1), 800 KiB a token and 15.7 K slots in 12 GB (PagedAttention, Kwon et al. 2023, "
    "section 3 and Table 1). " + _EFFICIENCY,
)
_M1_MAX = replace(
    _A100,
    name="m1-max-qwen7b",
    bandwidth=400e9,
    flops=10.4e12,
    link=100e9,
    overhead=0.002,
    parameters=7.62e9,
    layers=28,
    kv_heads=4,
    window=32_768,
    memory=4 * GIB,
    source="M1 Max: 400 GB/s, 10.4 Tflop/s (Apple, October 2021; in 32 bits, 16 bits are no "
    "faster). Qwen2.5-7B: 7.62 billion parameters, 28 layers, 4 KV heads of 128 (Qwen2.5 technical "
    "report and config.json). 4 GiB for keys and values, efficiency 0.6, overhead 2 ms and a link "
    "of a quarter of the bandwidth (memory is unified: a swap is a copy) are assumed. "
    "Not measured on a Mac.",
)
_M4_MAX = replace(
    _M1_MAX,
    name="m4-max-qwen7b",
    bandwidth=546e9,
    flops=17.2e12,
    link=136e9,
    source="M4 Max: 546 GB/s (Apple, October 2024); 17.2 Tflop/s = 40 cores x 128 lanes x 2 x "
    "1.68 GHz (not published by Apple). The rest as m1-max-qwen7b. Not measured on a Mac.",
)
_M1 = replace(
    _M1_MAX,
    name="m1-qwen1.5b",
    bandwidth=68.25e9,
    flops=2.6e12,
    link=17e9,
    parameters=1.54e9,
    kv_heads=2,
    memory=2 * GIB,
    source="M1: 2.6 Tflop/s (Apple, November 2020), 68.25 GB/s (LPDDR4X-4266, 128 bits). "
    "Qwen2.5-1.5B: 1.54 billion parameters, 28 layers, 2 KV heads of 128 (Qwen2.5 technical "
    "report). 2 GiB for keys and values and the rest as m1-max-qwen7b. Not measured on a Mac.",
)
PRESETS = {preset.name: preset for preset in (_A100, _M1_MAX, _M4_MAX, _M1)}
