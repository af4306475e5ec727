"""Options by the names that users of llama.cpp know, turned into what its structures take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp

from moespac_llamacpp import native

#: What -ctk and -ctv take, as llama.cpp's common/arg.cpp lists them.
CACHE_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "bf16": 30,  # ggml.h; llama_cpp lacks its name
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "iq4_nl": llama_cpp.GGML_TYPE_IQ4_NL,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
}

FLASH_ATTENTION = {
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
}


def choose(option: str, value: str, values: dict[str, int]) -> int:
    """The number behind a name. ValueError: there is no such name."""
    if value.lower() not in values:
        raise ValueError(f"{option} takes {', '.join(values)}, not {value!r}")
    return values[value.lower()]


def context_fields(
    flash_attn: str | None = None, cache_type_k: str | None = None, cache_type_v: str | None = None
) -> dict[str, Any]:
    """Fields of llama_context_params; None leaves llama.cpp's default. ValueError: an unknown name."""
    fields: dict[str, Any] = {}
    if flash_attn is not None:
        fields["flash_attn_type"] = choose("flash attention", flash_attn, FLASH_ATTENTION)
    if cache_type_k is not None:
        fields["type_k"] = choose("the type of the K cache", cache_type_k, CACHE_TYPES)
    if cache_type_v is not None:
        fields["type_v"] = choose("the type of the V cache", cache_type_v, CACHE_TYPES)
    return fields


def tensor_overrides(texts: Sequence[str], device: native.Device) -> list[tuple[str, int]]:
    """(pattern, buffer type) of each "pattern=buffer type", commas between several. ValueError: no such buffer type, or one of
    a GPU that is not `device`: llama.cpp does not use it, and would abort."""
    types = {
        other.buffer_name: other.buffer_type for other in native.devices() if other in (device, native.cpu_device())
    }
    rules = []
    for text in (part for whole in texts for part in whole.split(",")):
        pattern, equals, name = text.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"a tensor override is <pattern>=<buffer type>, not {text!r}")
        if name not in types:
            raise ValueError(f"there is no buffer type {name!r} for tensors; there are {', '.join(types)}")
        rules.append((pattern, types[name]))
    return rules
