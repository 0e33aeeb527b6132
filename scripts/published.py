"""Figures that others printed, to stand beside ours; rounded as they printed them.

WASTE and BLOCK_SIZE come from the published analysis that these scripts reproduce: 5,000 ShareGPT
and 5,000 Alpaca requests, lengths counted with the Qwen2.5 tokenizer. It does not say which
requests, so ours are another sample; TOLERANCE is how far two samples may lie apart, in points.
KWON is *Efficient Memory Management for Large Language Model Serving with PagedAttention*
(Kwon et al., SOSP 2023): OPT-13B on one A100 with 40 GB.
"""

from __future__ import annotations

WASTE: dict[str, dict[str, dict[str, float]]] = {
    "sharegpt": {
        "real_percent": {"max": 17.6, "pow2": 47.7, "oracle": 63.0, "paged": 98.0},
        "slots": {"max": 2048, "pow2": 757, "oracle": 573, "paged": 369},
        "running": {"max": 7, "pow2": 20, "oracle": 27, "paged": 42},
    },
    "alpaca": {
        "real_percent": {"max": 3.4, "pow2": 41.9, "oracle": 57.0, "paged": 90.4},
        "slots": {"max": 2048, "pow2": 168, "oracle": 124, "paged": 78},
        "running": {"max": 7, "pow2": 93, "oracle": 127, "paged": 201},
    },
}

TOLERANCE: dict[str, dict[str, float]] = {
    "sharegpt": {"max": 0.7, "pow2": 0.7, "oracle": 0.7, "paged": 0.1},
    "alpaca": {"max": 0.8, "pow2": 0.8, "oracle": 0.8, "paged": 0.5},
}

# Per block size: tokens that are real, in percent of the slots held; blocks per finished request.
BLOCK_SIZE: dict[str, dict[int, tuple[float, float]]] = {
    "sharegpt": {
        1: (100.0, 424.0),
        4: (99.6, 106.4),
        8: (99.0, 53.4),
        16: (98.0, 27.0),
        32: (95.9, 13.7),
        64: (92.0, 7.1),
        128: (84.9, 3.8),
        256: (73.0, 2.2),
    },
    "alpaca": {
        1: (100.0, 75.5),
        4: (97.9, 19.2),
        8: (95.3, 9.9),
        16: (90.4, 5.2),
        32: (82.4, 2.8),
        64: (68.7, 1.7),
        128: (48.8, 1.1),
        256: (27.2, 1.0),
    },
}

# Figure 2, percent of the KV cache: token states, reservation, internal fragmentation, external
# fragmentation and others; of vLLM only the first is given.
KWON_WASTE: dict[str, tuple[float, ...]] = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3,),
}
# Figure 13a: requests in flight on ShareGPT at 2 requests a second.
KWON_IN_FLIGHT = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}
# Section 6.2: request rates that vLLM sustains on ShareGPT, over those of Orca (from, to).
KWON_RATE = {"max": (2.7, 8.0), "oracle": (1.7, 2.7)}
# Section 6.2: mean lengths of its ShareGPT requests, in tokens.
KWON_LENGTHS = {"prompt": 161.31, "answer": 337.99}
# Section 6.3: blocks saved by sharing, in percent of those without, from 2 to 6 samples or beams.
KWON_SHARING: dict[str, dict[str, dict[int, float]]] = {
    "alpaca": {"samples": {2: 6.1, 6: 9.8}, "beams": {2: 37.6, 6: 55.2}},
    "sharegpt": {"samples": {2: 16.2, 6: 30.5}, "beams": {2: 44.3, 6: 66.3}},
}
