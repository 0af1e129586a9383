# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of the compile path, built at import: no protoc, no generated file.

HLO's are those of XLA's public hlo.proto and xla_data.proto, as far as NxD or this folder reads or writes them; every
other field survives a round trip as an unknown one. The Neuron runtime's metaneff.proto is closed: `MetaNeff` is a
message of our own under the names that NxD uses, and its bytes mean nothing to a runtime.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "neuron_hlo"

ENUMS = {
    "PrimitiveType": (
        "PRIMITIVE_TYPE_INVALID PRED S8 S16 S32 S64 U8 U16 U32 U64 F16 F32 F64 TUPLE OPAQUE_TYPE C64 BF16 TOKEN "
        "C128 F8E5M2 F8E4M3FN S4 U4 F8E4M3B11FNUZ F8E5M2FNUZ F8E4M3FNUZ S2 U2 F8E4M3 F8E3M4"
    ),
    "Kind": "UNDEFINED_ALIAS MAY_ALIAS MUST_ALIAS",
    "MetaTensorType": "UNKNOWN USER_INPUT INPUT_WEIGHT INPUT_STATE OUTPUT CONSTANT UNIFORM",
}

# message -> "name type number", a star before the type: repeated, two types with a colon: a map
MESSAGES = {
    "ShapeProto": (
        "element_type PrimitiveType 2, dimensions *int64 3, tuple_shapes *ShapeProto 4, is_dynamic_dimension *bool 6"
    ),
    "ProgramShapeProto": "parameters *ShapeProto 1, result ShapeProto 2, parameter_names *string 3",
    "FrontendAttributes": "map string:string 1",
    # of a literal's values, those kinds that are looked at; bfloat16 are two bytes each
    "LiteralProto": (
        "shape ShapeProto 1, s32s *int32 4, s64s *int64 5, u32s *uint32 6, u64s *uint64 7, f32s *float 8, "
        "f64s *double 9, f16s bytes 11, bf16s bytes 13"
    ),
    "SliceDimensions": "start int64 1, limit int64 2, stride int64 3",
    "GatherDimensionNumbers": (
        "offset_dims *int64 1, collapsed_slice_dims *int64 2, start_index_map *int64 3, index_vector_dim int64 4"
    ),
    "ScatterDimensionNumbers": (
        "update_window_dims *int64 1, inserted_window_dims *int64 2, scatter_dims_to_operand_dims *int64 3, "
        "index_vector_dim int64 4"
    ),
    "ReplicaGroup": "replica_ids *int64 1",
    "CollectiveDeviceListProto": "replica_groups *ReplicaGroup 1",
    "OpMetadata": "op_type string 1, op_name string 2, source_file string 3, source_line int32 4",
    "DotDimensionNumbers": (
        "lhs_contracting_dimensions *int64 1, rhs_contracting_dimensions *int64 2, lhs_batch_dimensions *int64 3, "
        "rhs_batch_dimensions *int64 4"
    ),
    "HloInstructionProto": (
        "name string 1, opcode string 2, shape ShapeProto 3, metadata OpMetadata 7, literal LiteralProto 8, "
        "parameter_number int64 9, dimensions *int64 14, slice_dimensions *SliceDimensions 17, "
        "custom_call_target string 28, dot_dimension_numbers DotDimensionNumbers 30, "
        "gather_dimension_numbers GatherDimensionNumbers 33, id int64 35, operand_ids *int64 36, "
        "called_computation_ids *int64 38, backend_config bytes 43, comparison_direction string 63, "
        "scatter_dimension_numbers ScatterDimensionNumbers 48, replica_groups *ReplicaGroup 49, "
        "rng_algorithm int32 70, "
        "frontend_attributes FrontendAttributes 68, collective_device_list CollectiveDeviceListProto 87"
    ),
    "HloComputationProto": (
        "name string 1, instructions *HloInstructionProto 2, program_shape ProgramShapeProto 4, id int64 5, "
        "root_id int64 6"
    ),
    "AliasEntryProto": (
        "output_shape_index *int64 1, parameter_number int64 2, parameter_shape_index *int64 3, kind Kind 4"
    ),
    "HloInputOutputAliasProto": "entries *AliasEntryProto 1",
    "HloModuleProto": (
        "name string 1, entry_computation_name string 2, computations *HloComputationProto 3, "
        "host_program_shape ProgramShapeProto 4, id int64 5, entry_computation_id int64 6, "
        "input_output_alias HloInputOutputAliasProto 8, is_dynamic bool 11, frontend_attributes FrontendAttributes 19"
    ),
    "MetaTensor": (
        "name bytes 1, shape *int64 2, data_type int32 3, type MetaTensorType 4, checkpoint_key bytes 5, "
        "user_input_key bytes 6, value bytes 7"
    ),
    "MetaNeff": "input_tensors *MetaTensor 1, output_tensors *MetaTensor 2, output_aliases_to int32:int32 3",
}

FIELD = descriptor_pb2.FieldDescriptorProto


def _set_type(field: FIELD, type_name: str) -> None:
    if type_name in ENUMS or type_name in MESSAGES:
        field.type = FIELD.TYPE_ENUM if type_name in ENUMS else FIELD.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{type_name}"
    else:
        field.type = getattr(FIELD, f"TYPE_{type_name.upper()}")


def _add_field(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    name, type_name, number = text.split()
    label = FIELD.LABEL_REPEATED if type_name[0] == "*" or ":" in type_name else FIELD.LABEL_OPTIONAL
    field = message.field.add(name=name, number=int(number), label=label)
    if ":" not in type_name:
        _set_type(field, type_name.lstrip("*"))
        return
    # a map is a repeated message of key and value
    entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
    entry.options.map_entry = True
    for at, (part, part_type) in enumerate(zip(("key", "value"), type_name.split(":"), strict=True), 1):
        _set_type(entry.field.add(name=part, number=at, label=FIELD.LABEL_OPTIONAL), part_type)
    field.type, field.type_name = FIELD.TYPE_MESSAGE, f".{PACKAGE}.{message.name}.{entry.name}"


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            _add_field(message, text)
    return file


class _Enum:
    """As generated code has it: values as attributes, `Name(number)`."""

    def __init__(self, values: str):
        self.names = values.split()
        for number, name in enumerate(self.names):
            setattr(self, name, number)

    def Name(self, number: int) -> str:
        return self.names[number]


descriptor_pool.Default().Add(_file())
globals().update(
    {
        name: message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }
)
PrimitiveType, Kind = _Enum(ENUMS["PrimitiveType"]), _Enum(ENUMS["Kind"])
MetaTensor.Type = _Enum(ENUMS["MetaTensorType"])  # noqa: F821
