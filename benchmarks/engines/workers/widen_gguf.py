"""Writes a quantized GGUF again with its weights in bfloat16: ``widen_gguf.py FROM TO``."""

import sys

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""Fields that are the writer's own, or of the weights as they were."""


def main(source: str, target: str) -> None:
    """All fields and tensors, vectors in float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(OWN):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        kind = GGMLQuantizationType.BF16 if tensor.data.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(dequantize(tensor.data, tensor.tensor_type), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main(*sys.argv[1:])
