"""The same model without quantized weights, for tests that ask what quantized activations have to do with it."""

from __future__ import annotations

from pathlib import Path

import gguf


def write_f32(source: Path, path: Path) -> Path:
    """Writes `source` to `path` with every tensor as the F32 values that its blocks stand for, and with all its metadata.

    ggml computes with F32 activations where the weights are F32; beside quantized ones it rounds them to 8 bits."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
