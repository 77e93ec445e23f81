//! The names that a pickle of tensors has to have, and what calling them makes. Every other name is refused.

use super::heap::{Heap, Id, Tensor, Value};
use crate::safetensors::DType;

/// A name that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// `collections.OrderedDict`.
    OrderedDict,
    /// `torch.Size`.
    Size,
    /// `_codecs.encode`, by which protocol 2 has bytes.
    Encode,
    /// `torch._utils._rebuild_tensor`, `_v2` and `_v3`, with the numbers of arguments that each takes.
    Tensor { least: usize, most: usize },
    /// `torch._utils._rebuild_parameter`.
    Parameter,
    /// A class of storages; None: untyped.
    Storage(Option<DType>),
    /// A type of elements.
    Element(DType),
}

/// Arguments of `_rebuild_tensor_v2` without and with metadata: storage, offset, size, stride, requires_grad, hooks.
const V2_ARGUMENTS: usize = 6;

const NAMES: &[(&str, &str, Name)] = &[
    ("collections", "OrderedDict", Name::OrderedDict),
    ("torch", "Size", Name::Size),
    ("_codecs", "encode", Name::Encode),
    ("torch._utils", "_rebuild_tensor", Name::Tensor { least: 4, most: 4 }),
    ("torch._utils", "_rebuild_tensor_v2", Name::Tensor { least: V2_ARGUMENTS, most: V2_ARGUMENTS + 1 }),
    // The type of elements comes before the metadata.
    ("torch._utils", "_rebuild_tensor_v3", Name::Tensor { least: V2_ARGUMENTS + 1, most: V2_ARGUMENTS + 2 }),
    ("torch._utils", "_rebuild_parameter", Name::Parameter),
    ("torch", "FloatStorage", Name::Storage(Some(DType::F32))),
    ("torch", "HalfStorage", Name::Storage(Some(DType::F16))),
    ("torch", "BFloat16Storage", Name::Storage(Some(DType::BF16))),
    ("torch", "DoubleStorage", Name::Storage(Some(DType::F64))),
    ("torch", "ByteStorage", Name::Storage(Some(DType::U8))),
    ("torch", "CharStorage", Name::Storage(Some(DType::I8))),
    ("torch", "ShortStorage", Name::Storage(Some(DType::I16))),
    ("torch", "IntStorage", Name::Storage(Some(DType::I32))),
    ("torch", "LongStorage", Name::Storage(Some(DType::I64))),
    ("torch", "BoolStorage", Name::Storage(Some(DType::Bool))),
    ("torch", "ComplexFloatStorage", Name::Storage(Some(DType::C64))),
    ("torch", "UntypedStorage", Name::Storage(None)),
    ("torch.storage", "UntypedStorage", Name::Storage(None)),
    ("torch", "float32", Name::Element(DType::F32)),
    ("torch", "float16", Name::Element(DType::F16)),
    ("torch", "bfloat16", Name::Element(DType::BF16)),
    ("torch", "float64", Name::Element(DType::F64)),
    ("torch", "uint8", Name::Element(DType::U8)),
    ("torch", "int8", Name::Element(DType::I8)),
    ("torch", "int16", Name::Element(DType::I16)),
    ("torch", "int32", Name::Element(DType::I32)),
    ("torch", "int64", Name::Element(DType::I64)),
    ("torch", "bool", Name::Element(DType::Bool)),
    ("torch", "complex64", Name::Element(DType::C64)),
    ("torch", "uint16", Name::Element(DType::U16)),
    ("torch", "uint32", Name::Element(DType::U32)),
    ("torch", "uint64", Name::Element(DType::U64)),
    ("torch", "float8_e4m3fn", Name::Element(DType::F8E4M3)),
    ("torch", "float8_e5m2", Name::Element(DType::F8E5M2)),
    ("torch", "float8_e4m3fnuz", Name::Element(DType::F8E4M3Fnuz)),
    ("torch", "float8_e5m2fnuz", Name::Element(DType::F8E5M2Fnuz)),
    ("torch", "float8_e8m0fnu", Name::Element(DType::F8E8M0)),
];

impl Name {
    /// The name, if it is known.
    pub fn of(module: &str, name: &str) -> Option<Self> {
        NAMES.iter().find(|(m, n, _)| *m == module && *n == name).map(|(_, _, known)| *known)
    }

    /// As a pickle spells it.
    fn text(self) -> String {
        let of = NAMES.iter().find(|(_, _, known)| *known == self);
        of.map_or_else(String::new, |(module, name, _)| format!("{module}.{name}"))
    }

    /// What calling it makes. Errors: it is nothing to call; other arguments than it takes.
    pub fn call<'a>(self, arguments: Id, heap: &mut Heap<'a>) -> Result<Id, String> {
        let Value::Tuple(given) = heap.get(arguments) else {
            return Err(format!("calls `{}` with {}, not a tuple", self.text(), heap.get(arguments).kind()));
        };
        let count = given.len();
        let wrong = |what: &str| Err(format!("calls `{}` with {what}", self.text()));
        match (self, given.as_slice()) {
            (Name::OrderedDict, []) => heap.add(Value::Dict(Vec::new())),
            (Name::OrderedDict, &[items]) => {
                let pair = |&item: &Id| match heap.items(item) {
                    Some(&[key, value]) => Some((key, value)),
                    _ => None,
                };
                match heap.items(items).and_then(|items| items.iter().map(pair).collect::<Option<Vec<_>>>()) {
                    Some(pairs) => heap.add(Value::Dict(pairs)),
                    None => wrong("other than pairs"),
                }
            }
            (Name::Size, &[size]) if heap.items(size).is_some() => Ok(size),
            (Name::Encode, [_, _]) => heap.add(Value::Opaque("bytes")),
            (Name::Parameter, &[data, _, _]) if matches!(heap.get(data), Value::Tensor(_)) => Ok(data),
            (Name::Tensor { least, most }, &[storage, offset, size, stride, ref more @ ..])
                if (least..=most).contains(&count) =>
            {
                if !matches!(heap.get(storage), Value::Storage(_)) {
                    return wrong(&format!("{} for a storage", heap.get(storage).kind()));
                }
                // After requires_grad and hooks: the type of elements, if it takes one, and metadata, if it has some.
                let (dtype, metadata) = match (least > V2_ARGUMENTS, more) {
                    (true, &[_, _, dtype, ref metadata @ ..]) => match heap.get(dtype) {
                        Value::Name(Name::Element(dtype)) => (Some(*dtype), metadata),
                        other => return wrong(&format!("{} for a type", other.kind())),
                    },
                    (false, &[_, _, ref metadata @ ..]) => (None, metadata),
                    _ => (None, &[][..]),
                };
                let plain = |&id: &Id| match heap.get(id) {
                    Value::None => true,
                    Value::Dict(pairs) => pairs.is_empty(),
                    _ => false,
                };
                if !metadata.iter().all(plain) {
                    return wrong("metadata (conjugate or negative views are not read)");
                }
                heap.add(Value::Tensor(Tensor { storage, offset, size, stride, dtype }))
            }
            (Name::Storage(_) | Name::Element(_), _) => {
                Err(format!("asks to call `{}`, which is not read", self.text()))
            }
            _ => wrong(&format!("{count} arguments of other kinds than it takes")),
        }
    }
}
