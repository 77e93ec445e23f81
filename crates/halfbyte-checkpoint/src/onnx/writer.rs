//! Laying out a model: its graph, and the places of its tensors in a file beside it.

use super::element::ElementType;
use super::pack::BlockLayout;
use super::proto::Message;
use crate::error::{Error, Result};
use crate::safetensors::{DType, TensorSpec};
use crate::writer::Writer;
use std::collections::HashSet;
use std::path::Path;

const OP: &str = "write ONNX";
const MODEL: &str = "model.onnx";
const DATA: &str = "model.onnx.data";

/// The version of the file format that came with version 21 of the operators.
const IR_VERSION: u64 = 10;
const OPSET: u64 = 21;
/// The last element type of that version.
const LAST_ELEMENT: u32 = 22;

/// Tensors begin at multiples of this, as ONNX asks for so that readers can map each of them.
const ALIGNMENT: u64 = 4096;

/// Messages of 2 GiB are refused by readers.
const MAX_MODEL_BYTES: usize = i32::MAX as usize;

/// A quantised product that is going to be written: one `MatMulNBits` node from the graph's input `<prefix>.input`
/// `[m, k]` to its output `<prefix>.output` `[m, n]`, both of the scales' type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    /// Name of the module; the initialisers are `<prefix>.weight_Q<bits>`, `<prefix>.scales`, `<prefix>.zero_points`.
    pub prefix: String,
    /// Shapes and types of the initialisers.
    pub layout: BlockLayout,
    /// Whether the node adds an initialiser `<prefix>.bias` `[n]`, of the scales' type.
    pub bias: bool,
    /// What the activations may become: 0 nothing said, 1 f32, 2 f16, 3 bf16, 4 int8.
    pub accuracy_level: u32,
}

/// A tensor with its type and place in ONNX's terms.
struct Initializer {
    name: String,
    element: &'static ElementType,
    shape: Vec<usize>,
    offset: u64,
    bytes: usize,
}

/// Begins `model.onnx` and, with the data of all tensors, `model.onnx.data`: `tensors` become initialisers that no node
/// reads, `metadata` keys and values of the model.
///
/// Errors: a name declared twice or empty, a type that ONNX does not have, a shape that overflows, a graph beyond 2 GiB, a
/// file that exists already, the system's refusal.
pub fn create(
    dir: impl AsRef<Path>,
    products: &[Product],
    tensors: &[TensorSpec],
    metadata: &[(String, String)],
) -> Result<Writer> {
    let dir = dir.as_ref();
    let mut names = HashSet::new();
    let mut unique = |name: &str| {
        if name.is_empty() || !names.insert(name.to_owned()) {
            return Err(Error::invalid(OP, "names once each and not empty", format!("`{name}`")));
        }
        Ok(())
    };
    let mut initializers = Vec::new();
    let mut end = 0u64;
    let mut declare = |name: String, dtype: DType, shape: Vec<usize>| {
        unique(&name)?;
        let fits = || format!("`{name}` of {dtype} {shape:?}");
        let element = ElementType::from_dtype(dtype)
            .filter(|element| element.number <= LAST_ELEMENT)
            .ok_or_else(|| Error::invalid(OP, format!("types of ONNX's IR version {IR_VERSION}"), fits()))?;
        let bytes = dtype.bytes_of(&shape).filter(|_| shape.iter().all(|&d| i64::try_from(d).is_ok()));
        let offset = end.next_multiple_of(ALIGNMENT);
        let after = bytes.and_then(|bytes| offset.checked_add(bytes as u64)).filter(|&end| end <= i64::MAX as u64);
        let (Some(bytes), Some(after)) = (bytes, after) else {
            return Err(Error::invalid(OP, "shapes that fit memory and fill whole bytes", fits()));
        };
        end = after;
        initializers.push(Initializer { name, element, shape, offset, bytes });
        Ok(())
    };
    for Product { prefix, layout, bias, .. } in products {
        for (ending, dtype, shape) in layout.tensors() {
            declare(format!("{prefix}.{ending}"), dtype, shape)?;
        }
        if *bias {
            declare(format!("{prefix}.bias"), layout.scale().into(), vec![layout.shape()[0]])?;
        }
    }
    for TensorSpec { name, dtype, shape } in tensors {
        declare(name.clone(), *dtype, shape.clone())?;
    }
    for Product { prefix, .. } in products {
        unique(&format!("{prefix}.input"))?;
        unique(&format!("{prefix}.output"))?;
    }
    let model = model(products, &initializers, metadata);
    if model.len() > MAX_MODEL_BYTES {
        return Err(Error::invalid(OP, "a graph below 2 GiB", format!("{} bytes", model.len())));
    }
    let mut writer = Writer::new(OP);
    writer.end_with(dir.join(MODEL), model)?;
    writer.add_file(dir.join(DATA), &[], end)?;
    for Initializer { name, offset, bytes, .. } in initializers {
        writer.declare(name, offset, bytes)?;
    }
    Ok(writer)
}

/// A `ModelProto`.
fn model(products: &[Product], initializers: &[Initializer], metadata: &[(String, String)]) -> Vec<u8> {
    let mut model = Message::default();
    model.number(1, IR_VERSION);
    model.text(2, "halfbyte");
    model.text(3, env!("CARGO_PKG_VERSION"));
    model.message(7, |graph| {
        products.iter().for_each(|product| _ = graph.message(1, |node| write_node(node, product)));
        graph.text(2, "halfbyte");
        initializers.iter().for_each(|tensor| _ = graph.message(5, |proto| write_tensor(proto, tensor)));
        for (field, end) in [(11, "input"), (12, "output")] {
            for Product { prefix, layout, .. } in products {
                let [n, k] = layout.shape();
                let columns = if end == "input" { k } else { n };
                let dtype = layout.scale().into();
                graph.message(field, |value| write_value(value, &format!("{prefix}.{end}"), dtype, columns));
            }
        }
    });
    for (domain, version) in [("", OPSET), ("com.microsoft", 1)] {
        model.message(8, |opset| _ = opset.text(1, domain).number(2, version));
    }
    for (key, value) in metadata {
        model.message(14, |entry| write_entry(entry, key, value));
    }
    model.into_bytes()
}

/// A `NodeProto`.
fn write_node(node: &mut Message, product: &Product) {
    let Product { prefix, layout, bias, accuracy_level } = product;
    let mut inputs: Vec<String> = ["input".to_owned()]
        .into_iter()
        .chain(layout.tensors().map(|(ending, ..)| ending))
        .map(|ending| format!("{prefix}.{ending}"))
        .collect();
    if *bias {
        // Inputs that are left out have empty names: zero points, perhaps, and g_idx.
        inputs.resize(5, String::new());
        inputs.push(format!("{prefix}.bias"));
    }
    inputs.iter().for_each(|input| _ = node.text(1, input));
    node.text(2, &format!("{prefix}.output")).text(3, prefix).text(4, "MatMulNBits");
    let [n, k] = layout.shape();
    let attributes = [
        ("K", k as u64),
        ("N", n as u64),
        ("bits", u64::from(layout.bits())),
        ("block_size", layout.block_size() as u64),
        ("accuracy_level", u64::from(*accuracy_level)),
    ];
    for (name, value) in attributes.into_iter().filter(|&(_, value)| value != 0) {
        const INT: u64 = 2;
        node.message(5, |attribute| _ = attribute.text(1, name).number(3, value).number(20, INT));
    }
    node.text(7, "com.microsoft");
}

/// A `TensorProto` whose data are external.
fn write_tensor(proto: &mut Message, tensor: &Initializer) {
    tensor.shape.iter().for_each(|&d| _ = proto.number(1, d as u64));
    proto.number(2, u64::from(tensor.element.number)).text(8, &tensor.name);
    for (key, value) in
        [("location", DATA.to_owned()), ("offset", tensor.offset.to_string()), ("length", tensor.bytes.to_string())]
    {
        proto.message(13, |entry| write_entry(entry, key, &value));
    }
    const EXTERNAL: u64 = 1;
    proto.number(14, EXTERNAL);
}

/// A `ValueInfoProto` of a matrix `[m, columns]`, m being left open.
fn write_value(value: &mut Message, name: &str, dtype: DType, columns: usize) {
    let number = ElementType::from_dtype(dtype).map_or(0, |element| element.number);
    value.text(1, name).message(2, |kind| {
        kind.message(1, |tensor| {
            tensor.number(1, u64::from(number)).message(2, |shape| {
                shape.message(1, |m| _ = m.text(2, "m")).message(1, |k| _ = k.number(1, columns as u64));
            });
        });
    });
}

/// A `StringStringEntryProto`.
fn write_entry(entry: &mut Message, key: &str, value: &str) {
    entry.text(1, key).text(2, value);
}
