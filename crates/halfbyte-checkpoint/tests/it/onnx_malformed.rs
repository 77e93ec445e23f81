//! ONNX files that lie: each an error that names the file and, where there is one, the tensor or node.

use crate::onnx::{product, quantized};
use crate::support::{assert_names, testdata, text_of};
use halfbyte::Float;
use halfbyte_checkpoint::onnx::{Blocks, MatMulNBits, Model, Place, TensorBytes, describe, load};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{Error, Job, Result, Weights, write_dense};
use std::path::Path;

/// A number as protocol buffers write it.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 128 {
        bytes.push(value as u8 | 128);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A field that holds a number.
fn number(field: u64, value: i64) -> Vec<u8> {
    [varint(field << 3), varint(value as u64)].concat()
}

/// A field that holds bytes, text or a message.
fn bytes(field: u64, content: impl AsRef<[u8]>) -> Vec<u8> {
    let content = content.as_ref();
    [varint(field << 3 | 2), varint(content.len() as u64), content.to_vec()].concat()
}

fn entry(field: u64, key: &str, value: &str) -> Vec<u8> {
    bytes(field, [bytes(1, key), bytes(2, value)].concat())
}

/// An initialiser of a graph.
fn initializer(name: &str, element: i64, dims: &[i64], data: &[Vec<u8>]) -> Vec<u8> {
    let dims: Vec<u8> = dims.iter().flat_map(|&d| number(1, d)).collect();
    bytes(5, [dims, number(2, element), bytes(8, name), data.concat()].concat())
}

/// A model of a graph with these fields.
fn model(fields: &[Vec<u8>]) -> Vec<u8> {
    bytes(7, fields.concat())
}

fn parse(content: &[u8]) -> Result<Model> {
    Model::parse(content, Path::new("hostile.onnx"))
}

#[track_caller]
fn refused(content: &[u8], parts: &[&str]) {
    let error = parse(content).unwrap_err();
    assert!(matches!(error, Error::Malformed { .. } | Error::Unsupported { .. }), "{error:?}");
    assert_names(&error.to_string(), &["hostile.onnx"]);
    assert_names(&error.to_string(), parts);
}

#[test]
fn files_that_are_no_models() {
    let cases: &[(&[u8], &[&str])] = &[
        (b"", &["not an ONNX model", "no graph"]),
        (&number(1, 10), &["no graph"]),
        (b"{\"a\": 1}", &["not an ONNX model"]),
        (b"<!DOCTYPE html>", &["not an ONNX model"]),
        (&[0x3a], &["number at byte 1 is cut off"]),
        (&[0x80], &["number at byte 0 is cut off"]),
        (&[0x3a, 5, 0], &["field at byte 0 has a length of 5, but only 1 bytes follow"]),
        (&[&[0x3a][..], &varint(u64::MAX)].concat(), &["length of 18446744073709551615"]),
        (&[&[0x08][..], &[0xff; 9], &[2]].concat(), &["byte 1 is longer than 64 bits"]),
        (&[&[0x08][..], &[0xff; 20]].concat(), &["byte 1 is longer than 64 bits"]),
        (&[0x00, 0], &["number 0"]),
        (&varint(1 << 35 << 3), &["number 34359738368"]),
        (&[0x0b], &["wire type 3"]),
        (&[0x0f], &["wire type 7"]),
        (&[0x0d, 1, 2], &["length of 4"]),
        (&[0x09, 1, 2], &["length of 8"]),
        (&number(7, 1), &["field 7 is a number"]),
        (&[model(&[]), model(&[])].concat(), &["two graphs"]),
        (&bytes(14, bytes(1, [0xff])), &["not UTF-8"]),
        (&model(&[number(1, 1)]), &["graph", "field 1 is a number"]),
        (&model(&[vec![0x0a, 9]]), &["graph", "length of 9"]),
        (&model(&[bytes(1, bytes(4, [0xff]))]), &["node ``", "not UTF-8"]),
    ];
    for (content, parts) in cases {
        refused(content, parts);
    }
    assert_eq!(parse(&model(&[])).unwrap().initializers(), []);
    // Fields that are not known are passed over, whatever their type.
    let unknown = [number(100, -1), bytes(101, "x"), [varint(102 << 3 | 5), vec![0; 4]].concat()];
    let more = [unknown.concat(), [varint(103 << 3 | 1), vec![0; 8]].concat(), model(&unknown)].concat();
    assert_eq!(parse(&more).unwrap().products(), []);
}

#[test]
fn tensors_that_do_not_fit_their_file() {
    let raw = |length: usize| bytes(9, vec![1; length]);
    let cases: &[(Vec<u8>, &[&str])] = &[
        (initializer("a", 1, &[2], &[raw(7)]), &["tensor `a`", "expected 8 bytes", "[2] of FLOAT", "got 7"]),
        (initializer("a", 1, &[2], &[raw(9)]), &["tensor `a`", "got 9"]),
        (initializer("a", 1, &[2], &[]), &["tensor `a`", "got 0"]),
        (initializer("a", 1, &[], &[]), &["tensor `a`", "expected 4 bytes", "got 0"]),
        (initializer("a", 22, &[3], &[raw(1)]), &["tensor `a`", "expected 2 bytes", "got 1"]),
        (initializer("a", 1, &[-1], &[]), &["tensor `a`", "[-1]", "negative"]),
        (initializer("a", 1, &[1 << 40, 1 << 40], &[]), &["tensor `a`", "overflows"]),
        (initializer("a", 1, &[1 << 40, 1 << 40, 0], &[]), &["tensor `a`", "overflows"]),
        (initializer("a", 1, &[1 << 62], &[]), &["tensor `a`", "overflows"]),
        (initializer("a", 1, &[1 << 50], &[raw(4)]), &["tensor `a`", "got 4"]),
        (initializer("a", 1, &[1; 33], &[raw(4)]), &["tensor `a`", "at most 32 dimensions"]),
        (initializer("a", 1, &[], &[bytes(1, [1; 9999])]), &["tensor `a`", "at most 32 dimensions"]),
        (initializer("a", 0, &[1], &[raw(4)]), &["tensor `a`", "unknown element type 0"]),
        (initializer("a", 99, &[1], &[raw(4)]), &["tensor `a`", "unknown element type 99"]),
        (initializer("", 1, &[1], &[raw(4)]), &["initializer", "no name"]),
        (bytes(5, [bytes(8, [0xff]), raw(4)].concat()), &["initializer", "not UTF-8"]),
        (initializer("a", 1, &[1], &[raw(4), bytes(4, [0; 4])]), &["tensor `a`", "got both"]),
        (initializer("a", 1, &[1], &[bytes(3, "")]), &["tensor `a`", "segments"]),
        (initializer("a", 1, &[1], &[bytes(4, [0; 3])]), &["tensor `a`", "field 4", "4 bytes"]),
        (initializer("a", 1, &[2], &[bytes(4, [0; 4])]), &["tensor `a`", "expected 8", "got 4"]),
        (initializer("a", 1, &[1], &[number(5, 1)]), &["tensor `a`", "field 4, got field 5"]),
        (initializer("a", 2, &[1], &[number(5, 256)]), &["tensor `a`", "256 is beyond the range of UINT8"]),
        (initializer("a", 3, &[1], &[number(5, -129)]), &["tensor `a`", "-129 is beyond the range of INT8"]),
        (initializer("a", 6, &[1], &[bytes(5, [1, 2])]), &["tensor `a`", "expected 4 bytes of elements", "got 8"]),
        (initializer("a", 7, &[2], &[bytes(7, [1])]), &["tensor `a`", "expected 16", "got 8"]),
        (initializer("a", 7, &[1], &[bytes(7, [0x80])]), &["tensor `a`", "cut off"]),
        (initializer("a", 7, &[1], &[[varint(7 << 3 | 1), vec![0; 8]].concat()]), &["tensor `a`", "varying length"]),
        ([initializer("a", 2, &[0], &[]), initializer("a", 2, &[0], &[])].concat(), &["`a` appears twice"]),
    ];
    for (fields, parts) in cases {
        refused(&model(std::slice::from_ref(fields)), parts);
    }
    // Millions of entries without content would take many times their bytes.
    refused(&bytes(14, "").repeat((1 << 22) + 1), &["more than 4194304 fields"]);
    // A field of 64 million small numbers for a tensor of one is not spread out.
    refused(&model(&[initializer("a", 7, &[1], &[bytes(7, vec![0; 1 << 26])])]), &["tensor `a`", "expected 8"]);
    let whole = parse(&model(&[
        initializer("floats", 1, &[2], &[[varint(4 << 3 | 5), vec![1; 4], varint(4 << 3 | 5), vec![2; 4]].concat()]),
        initializer("empty", 1, &[0, 7], &[]),
        initializer("words", 8, &[1], &[bytes(6, "word")]),
    ]));
    let whole = whole.unwrap();
    assert_eq!(whole.initializer("floats").unwrap().place, Place::Decoded(vec![1, 1, 1, 1, 2, 2, 2, 2]));
    assert_eq!((whole.initializer("empty").unwrap().bytes, whole.initializer("words")), (0, None));
}

#[test]
fn external_data_that_lie_elsewhere() {
    let external = |entries: &[(&str, &str)]| {
        let mut data: Vec<Vec<u8>> = entries.iter().map(|(key, value)| entry(13, key, value)).collect();
        data.push(number(14, 1));
        model(&[initializer("a", 1, &[2], &data)])
    };
    for location in ["..", "../x", "x/../../y", "/etc/passwd", "", ".", "..\\x", "C:\\x", "x\0y"] {
        refused(&external(&[("location", location)]), &["tensor `a`", "the model's folder"]);
    }
    type Entries<'a> = &'a [(&'a str, &'a str)];
    let cases: &[(Entries<'_>, &[&str])] = &[
        (&[], &["tensor `a`", "no `location`"]),
        (&[("location", "x"), ("location", "y")], &["tensor `a`", "`location` appears twice"]),
        (&[("location", "x"), ("offset", "-1")], &["tensor `a`", "`offset`", "\"-1\""]),
        (&[("location", "x"), ("offset", "18446744073709551616")], &["tensor `a`", "`offset`"]),
        (&[("location", "x"), ("length", "")], &["tensor `a`", "`length`"]),
        (&[("location", "x"), ("compression", "zstd")], &["tensor `a`", "external data", "\"compression\""]),
        (&[("location", "x"), ("length", "7")], &["tensor `a`", "length of 8", "got 7"]),
    ];
    for (entries, parts) in cases {
        refused(&external(entries), parts);
    }
    let both = initializer("a", 1, &[1], &[bytes(9, [0; 4]), entry(13, "location", "x"), number(14, 1)]);
    refused(&model(&[both]), &["tensor `a`", "got both"]);

    let range = |offset: &str, size| {
        let entries =
            [("location", "d/x.data"), ("offset", offset), ("length", "8"), ("checksum", "?"), ("basepath", "/x")];
        let model = parse(&external(&entries)).unwrap();
        model.initializer("a").unwrap().external_range(size, Path::new("hostile.onnx"))
    };
    assert_eq!(range("4", 12).unwrap(), 4..12);
    for offset in ["5", "13", "18446744073709551615"] {
        assert_names(
            &text_of(range(offset, 12)),
            &["hostile.onnx", "tensor `a`", offset, "past the end of d/x.data", "12"],
        );
    }
    let inline = parse(&model(&[initializer("a", 2, &[0], &[])])).unwrap();
    let text = text_of(inline.initializer("a").unwrap().external_range(9, Path::new("hostile.onnx")));
    assert_names(&text, &["tensor `a`", "external"]);
}

/// A `MatMulNBits` node.
fn node(name: &str, inputs: &[&str], attributes: &[(&str, i64)]) -> Vec<u8> {
    let inputs: Vec<u8> = inputs.iter().flat_map(|input| bytes(1, input)).collect();
    let attribute = |&(name, value): &(&str, i64)| bytes(5, [bytes(1, name), number(3, value)].concat());
    let attributes: Vec<u8> = attributes.iter().flat_map(attribute).collect();
    bytes(1, [inputs, bytes(3, name), bytes(4, "MatMulNBits"), attributes, bytes(7, "com.microsoft")].concat())
}

const SIZES: &[(&str, i64)] = &[("K", 16), ("N", 1), ("block_size", 16)];

/// A model of nodes with initialisers of these names, which need not fit.
fn with_nodes(names: &[&str], nodes: &[Vec<u8>]) -> Vec<u8> {
    let tensors: Vec<Vec<u8>> = names.iter().map(|name| initializer(name, 2, &[0], &[])).collect();
    model(&[nodes.concat(), tensors.concat()])
}

#[test]
fn products_that_cannot_be_read() {
    let one = |inputs: &[&str], attributes: &[(&str, i64)]| with_nodes(&["w", "s"], &[node("n", inputs, attributes)]);
    let with = |name, value| one(&["x", "w", "s"], &[SIZES, &[(name, value)]].concat());
    let parsed = parse(&one(&["x", "w", "s"], SIZES)).unwrap();
    assert_eq!(parsed.products()[0].bits, 4);
    let cases: &[(Vec<u8>, &[&str])] = &[
        (one(&["x"], SIZES), &["node `n`", "weight as input 1, got none"]),
        (one(&["x", "", "s"], SIZES), &["node `n`", "weight as input 1, got none"]),
        (one(&["x", "w"], SIZES), &["node `n`", "scales as input 2, got none"]),
        (one(&["x", "y", "s"], SIZES), &["node `n`", "weight `y` is not an initializer"]),
        (one(&["x", "w", "s", "z"], SIZES), &["node `n`", "zero points `z` is not an initializer"]),
        (one(&["x", "w", "s", "", "", "", "s"], SIZES), &["node `n`", "at most 6 inputs, got 7"]),
        (one(&["x", "w", "s"], &SIZES[1..]), &["node `n`", "no attribute `K`"]),
        (one(&["x", "w", "s"], &SIZES[..2]), &["node `n`", "no attribute `block_size`"]),
        (with("K", 0), &["node `n`", "`K` to be at least 1, got 0"]),
        (with("N", -1), &["node `n`", "`N` to be at least 1, got -1"]),
        (with("bits", -4), &["node `n`", "`bits`", "-4"]),
        (with("weight_prepacked", 1), &["node `n`", "`weight_prepacked` to be 0", "got 1"]),
        (with("order", 1), &["node `n`", "unknown attribute `order`"]),
    ];
    for (content, parts) in cases {
        refused(content, parts);
    }
    // What else an attribute holds is told, whether or not the file declares its type.
    let others: [(i64, Vec<u8>, &str); 4] = [
        (3, bytes(4, "16"), "a string"),
        (1, [vec![2 << 3 | 5], 16f32.to_le_bytes().to_vec()].concat(), "a float"),
        (7, number(8, 16), "a list"),
        (5, bytes(6, ""), "another type"),
    ];
    for (declared, held, got) in others {
        for of_type in [Vec::new(), number(20, declared)] {
            let attribute = bytes(5, [bytes(1, "K"), held.clone(), of_type].concat());
            let inputs: Vec<u8> = ["x", "w", "s"].iter().flat_map(|input| bytes(1, input)).collect();
            let product = [inputs, bytes(3, "n"), bytes(4, "MatMulNBits"), attribute, bytes(7, "com.microsoft")];
            let content = with_nodes(&["w", "s"], &[bytes(1, product.concat())]);
            refused(&content, &["node `n`", &format!("expected `K` to be an integer, got {got}")]);
        }
    }
    // The same product twice is one; another one of the same weight is not understood.
    let other = |inputs: &[&str], block_size| {
        let sizes = [("K", 16), ("N", 1), ("block_size", block_size)];
        with_nodes(&["w", "s", "t"], &[node("n", &["x", "w", "s"], SIZES), node("o", inputs, &sizes)])
    };
    assert_eq!(parse(&other(&["y", "w", "s"], 16)).unwrap().products().len(), 1);
    for content in [other(&["y", "w", "t"], 16), other(&["y", "w", "s"], 32)] {
        refused(&content, &["tensor `w`", "`n` and `o`", "different weights"]);
    }
    // A node of this name in another domain is another operator.
    let foreign = bytes(1, [bytes(4, "MatMulNBits"), bytes(7, "elsewhere")].concat());
    assert_eq!(parse(&model(&[foreign])).unwrap().products(), []);
}

#[test]
fn modules_are_named_by_their_weights() {
    let named = |weights: &[&str]| -> Vec<String> {
        let nodes: Vec<Vec<u8>> = weights.iter().map(|w| node("n", &["x", w, "scale"], SIZES)).collect();
        let model = parse(&with_nodes(&[weights, &["scale"]].concat(), &nodes)).unwrap();
        model.products().iter().map(|p| p.prefix.clone()).collect()
    };
    let cases = [
        ("a.q_proj.MatMul.weight_Q4", "a.q_proj"),
        ("a.q_proj.weight_Q8", "a.q_proj"),
        ("a.q_proj.MatMul.qweight", "a.q_proj"),
        ("lm_head.MatMulNBits.qweight", "lm_head"),
        ("onnx::MatMul_12_Q4", "onnx::MatMul_12"),
        ("a.weight_Q4G128", "a"),
        ("a_Quick", "a_Quick"),
        ("a_Q4G", "a_Q4G"),
        ("_Q4", "_Q4"),
        (".weight", ".weight"),
        ("plain", "plain"),
    ];
    for (weight, prefix) in cases {
        assert_eq!(named(&[weight]), [prefix]);
    }
    // Where two would have the same name, each has its own in full; also where the other's is short already.
    assert_eq!(named(&["a.weight_Q4", "a.qweight", "b.qweight"]), ["a.weight_Q4", "a.qweight", "b"]);
    assert_eq!(named(&["a.weight_Q4", "a"]), ["a.weight_Q4", "a"]);
    assert_eq!(named(&["a_Q4_Q4", "a_Q4", "a.weight"]), ["a_Q4_Q4", "a_Q4", "a.weight"]);
}

#[test]
fn graphs_within_graphs_are_followed_only_so_far() {
    let within = |depth: usize| {
        let mut graph = [initializer("w", 2, &[0], &[]), node("n", &["x", "w", "w"], SIZES)].concat();
        for _ in 0..depth {
            graph = bytes(1, [bytes(4, "If"), bytes(5, [bytes(1, "then_branch"), bytes(6, graph)].concat())].concat());
        }
        bytes(7, graph)
    };
    for depth in [0, 1, 15] {
        assert_eq!(parse(&within(depth)).unwrap().products().len(), 1, "{depth}");
    }
    for depth in [16, 1000] {
        refused(&within(depth), &["graph", "at most 16"]);
    }
    let branch = |name| bytes(5, bytes(name, initializer("w", 2, &[0], &[])));
    refused(&model(&[bytes(1, [branch(6), branch(11)].concat())]), &["tensor `w`", "two graphs"]);
}

/// Reads the products whose initialisers lie in the file; whatever comes of it, it is no panic.
fn read_products(model: &Model, content: &[u8]) -> usize {
    let tensor = |name: &String| {
        let tensor = model.initializer(name)?;
        let Place::Inline(range) = &tensor.place else { return None };
        Some(TensorBytes { dtype: tensor.element.dtype?, shape: &tensor.shape, bytes: &content[range.clone()] })
    };
    let read = |product: &&MatMulNBits| {
        let blocks = Blocks {
            weight: tensor(&product.weight)?,
            scales: tensor(&product.scales)?,
            zero_points: product.zero_points.as_ref().and_then(tensor),
            g_idx: product.g_idx.as_ref().and_then(tensor),
        };
        load(Path::new("hostile.onnx"), product, &blocks).ok()
    };
    model.products().iter().filter(|product| read(product).is_some()).count()
}

#[test]
fn a_damaged_file_is_an_error_or_another_model() {
    for name in ["quantizer_w4_asym", "external_w8_sym", "branches_w4_g_idx", "float_zeros_w4"] {
        let whole = std::fs::read(testdata(&format!("onnx/{name}.onnx"))).unwrap();
        let small = whole.len() < 1200;
        assert_eq!(read_products(&parse(&whole).unwrap(), &whole) > 0, name != "external_w8_sym");
        let check = |content: &[u8]| {
            let Ok(model) = parse(content) else { return };
            for tensor in model.initializers() {
                match &tensor.place {
                    Place::Inline(range) => assert!(range.end <= content.len() && range.len() == tensor.bytes),
                    Place::Decoded(decoded) => assert_eq!(decoded.len(), tensor.bytes),
                    Place::External { location, .. } => assert!(!location.contains("..")),
                }
            }
            if small {
                read_products(&model, content);
            }
        };
        for length in 0..whole.len() {
            check(&whole[..length]);
        }
        let mut damaged = whole.clone();
        for at in 0..whole.len() {
            for bit in 0..8 {
                damaged[at] ^= 1 << bit;
                check(&damaged);
                damaged[at] = whole[at];
            }
        }
    }
}

/// A product of 2 outputs, 20 inputs, 4 bits in blocks of 16, that can be read.
fn blocks() -> (MatMulNBits, Blocks<'static>) {
    let mut product = product([2, 20], 4, 16);
    product.zero_points = Some("zero_points".into());
    product.g_idx = Some("g_idx".into());
    let tensor = |dtype, shape, bytes| TensorBytes { dtype, shape, bytes };
    let blocks = Blocks {
        weight: tensor(DType::U8, &[2, 2, 8], &[0x21; 32]),
        scales: tensor(DType::F16, &[2, 2], &[0; 8]),
        zero_points: Some(tensor(DType::U8, &[2, 1], &[0x53; 2])),
        g_idx: Some(tensor(DType::I32, &[20], &[0; 80])),
    };
    (product, blocks)
}

#[test]
fn initialisers_that_do_not_fit_their_product() {
    let (product, good) = blocks();
    let file = Path::new("hostile.onnx");
    let loaded = quantized(load(file, &product, &good).unwrap());
    assert_eq!((loaded.0.zero_point(1, 0), loaded.0.zero_point(1, 1)), (Some(3), Some(5)));
    assert_names(&loaded.1[0].text, &["g_idx", "zero points"]);

    let refused = |change: &dyn Fn(&mut MatMulNBits, &mut Blocks<'_>), parts: &[&str]| {
        let (mut product, mut blocks) = (product.clone(), good);
        change(&mut product, &mut blocks);
        let text = text_of(load(file, &product, &blocks));
        assert_eq!(text, text_of(describe(file, &product, &blocks)));
        assert_names(&text, &["hostile.onnx"]);
        assert_names(&text, parts);
    };
    refused(&|_, b| b.weight.shape = &[2, 16], &["tensor `weight`", "U8 [2, 2, 8] or [32]", "[2, 16]"]);
    refused(&|_, b| b.weight.dtype = DType::I8, &["tensor `weight`", "got I8"]);
    refused(&|_, b| b.weight.bytes = &[0; 31], &["tensor `weight`", "expected 32 bytes", "got 31"]);
    refused(&|_, b| b.scales.shape = &[2, 3], &["tensor `scales`", "[2, 2] or [4]", "[2, 3]"]);
    refused(&|_, b| b.scales.dtype = DType::I16, &["tensor `scales`", "F16, BF16 or F32", "I16"]);
    refused(&|_, b| b.zero_points.as_mut().unwrap().shape = &[2, 2], &["tensor `zero_points`", "[2, 1] or [2]"]);
    refused(&|_, b| b.zero_points.as_mut().unwrap().dtype = DType::I8, &["tensor `zero_points`", "U8, F16"]);
    refused(&|_, b| b.zero_points.as_mut().unwrap().dtype = DType::F16, &["tensor `zero_points`", "[2, 2] or [4]"]);
    refused(&|_, b| b.g_idx.as_mut().unwrap().shape = &[21], &["tensor `g_idx`", "[20] or [32]", "[21]"]);
    refused(&|_, b| b.g_idx.as_mut().unwrap().dtype = DType::F32, &["tensor `g_idx`", "I32"]);
    refused(&|_, b| b.g_idx.as_mut().unwrap().bytes = &[255; 80], &["tensor `g_idx`", "from 0 to 1, got -1 at 0"]);
    refused(&|_, b| b.g_idx.as_mut().unwrap().bytes = &[2; 80], &["tensor `g_idx`", "got 33686018 at 0"]);
    refused(&|p, _| p.bits = 3, &["tensor `weight`", "2, 4 or 8 bits, got 3", "`node`"]);
    refused(&|p, _| p.block_size = 5, &["tensor `weight`", "whole bytes", "5"]);
    refused(&|p, _| p.k = 40, &["tensor `weight`", "[2, 3, 8]"]);
    refused(&|p, _| p.n = usize::MAX, &["tensor `weight`", "overflows"]);
    refused(&|p, _| p.block_size = usize::MAX, &["tensor `weight`", "overflows"]);
    refused(&|p, _| (p.k, p.block_size) = (usize::MAX, 2), &["tensor `weight`", "overflows"]);
    let infinite = Blocks { scales: TensorBytes { bytes: &[0, 0x7c, 0, 0, 0, 0, 0, 0], ..good.scales }, ..good };
    assert_names(&text_of(load(file, &product, &infinite)), &["tensor `m`", "scales finite", "inf"]);

    // An index may have entries for the padding as well; blocks that others refuse are read with a finding.
    let mut padded = good;
    padded.g_idx = Some(TensorBytes { dtype: DType::I32, shape: &[32], bytes: &[0; 128] });
    assert_eq!(quantized(load(file, &product, &padded).unwrap()), loaded);
    let small = MatMulNBits { block_size: 20, g_idx: None, zero_points: None, ..product };
    let weight = TensorBytes { shape: &[2, 1, 10], bytes: &[0; 20], ..good.weight };
    let scales = TensorBytes { shape: &[2, 1], bytes: &[0; 4], ..good.scales };
    let found = load(file, &small, &Blocks { weight, scales, zero_points: None, g_idx: None }).unwrap().findings;
    assert_names(&found[0].text, &["power of two"]);
}

/// What no other file can hold is named by who writes one.
#[test]
fn tensors_of_types_that_are_not_read_are_told_where_a_model_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.onnx");
    let raw = |count: usize| vec![bytes(9, vec![0; count])];
    let [int4, float] = [initializer("codes", 22, &[4], &raw(2)), initializer("norm.weight", 1, &[4], &raw(16))];
    std::fs::write(&path, model(&[int4, float])).unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let source = Weights::open(&path).unwrap();
    assert_eq!(source.checkpoint().unread(), ["codes"]);
    let written = write_dense(Job::new(&source, &dir.path().join("dense")), Float::F32).unwrap();
    assert_eq!(written.left_out, ["codes"]);
}
