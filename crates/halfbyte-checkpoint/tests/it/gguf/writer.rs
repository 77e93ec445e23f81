//! The writer: what it writes is read back, whole or not at all.

use super::tiny;
use crate::support::{assert_names, listing, taken, testdata, text_of, write_folder};
use halfbyte::Float;
use halfbyte_checkpoint::gguf::{Array, GgmlType, TensorSpec, Value, create, parse};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{Checkpoint, Conversion, Error, Job, Target, Weights, convert, write_dense};
use std::path::Path;

fn spec(name: &str, ggml_type: GgmlType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), ggml_type, shape: shape.to_vec() }
}

/// The tiny model, written by gguf's Python package, comes out the same byte by byte, in whatever order it is written.
#[test]
fn a_foreign_file_is_written_again_as_it_was() {
    let (bytes, header) = tiny();
    let specs: Vec<TensorSpec> = header.tensors.iter().map(|t| spec(&t.name, t.ggml_type, &t.shape)).collect();
    let dir = tempfile::tempdir().unwrap();
    for backwards in [false, true] {
        let path = dir.path().join(format!("{backwards}.gguf"));
        let mut writer = create(&path, &header.metadata, &specs).unwrap();
        let mut tensors: Vec<_> = header.tensors.iter().collect();
        if backwards {
            tensors.reverse();
        }
        for tensor in tensors {
            writer.write(&tensor.name, &bytes[tensor.range.clone()]).unwrap();
        }
        assert_eq!(writer.finish().unwrap().files, std::slice::from_ref(&path));
        assert!(std::fs::read(&path).unwrap() == bytes);
    }
    assert_eq!(listing(dir.path()), ["false.gguf", "true.gguf"]);
}

#[test]
fn every_type_of_value_comes_back() {
    let metadata: Vec<(String, Value)> = [
        Value::U8(255),
        Value::I8(-128),
        Value::U16(65535),
        Value::I16(-32768),
        Value::U32(u32::MAX),
        Value::I32(i32::MIN),
        Value::F32(-0.0),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F64(f64::MIN_POSITIVE),
        Value::Bool(true),
        Value::String("ü\0\n".into()),
        Value::Array(Array::U8(vec![0, 255])),
        Value::Array(Array::I8(vec![-1])),
        Value::Array(Array::U16(vec![1, 2, 3])),
        Value::Array(Array::I16(vec![-1])),
        Value::Array(Array::U32(vec![])),
        Value::Array(Array::I32(vec![i32::MIN, i32::MAX])),
        Value::Array(Array::F32(vec![1.5, f32::INFINITY])),
        Value::Array(Array::U64(vec![u64::MAX])),
        Value::Array(Array::I64(vec![-1])),
        Value::Array(Array::F64(vec![0.1])),
        Value::Array(Array::Bool(vec![true, false])),
        Value::Array(Array::String(vec![String::new(), "b".into()])),
        Value::Array(Array::Array(vec![Array::U8(vec![1]), Array::String(vec!["x".into()])])),
    ]
    .into_iter()
    .enumerate()
    .map(|(i, value)| (format!("key.{i}"), value))
    .collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    create(&path, &metadata, &[]).unwrap().finish().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let header = parse(&bytes, &path).unwrap();
    assert_eq!(header.metadata, metadata);
    assert!(header.tensors.is_empty());
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let begin = |metadata: &[(&str, Value)], tensors: &[TensorSpec]| {
        let metadata: Vec<_> = metadata.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        create(&path, &metadata, tensors)
    };
    let (f32, q4_0) = (GgmlType::F32, GgmlType::Q4_0);
    let one = Value::U32(1);
    let cases = [
        (begin(&[("", one.clone())], &[]), "keys once each"),
        (begin(&[("a", one.clone()), ("a", one.clone())], &[]), "keys once each"),
        (begin(&[("general.alignment", Value::U32(64))], &[]), "general.alignment"),
        (begin(&[], &[spec("", f32, &[1])]), "tensor names of 1 to 63 bytes"),
        (begin(&[], &[spec(&"n".repeat(64), f32, &[1])]), "tensor names of 1 to 63 bytes"),
        (begin(&[], &[spec("t", f32, &[1]), spec("t", f32, &[1])]), "tensor names once each"),
        (begin(&[], &[spec("t", f32, &[1, 1, 1, 1, 1])]), "up to 4 dimensions"),
        (begin(&[], &[spec("t", f32, &[2, 0])]), "dimensions above 0"),
        (begin(&[], &[spec("t", f32, &[usize::MAX, 2])]), "fit memory"),
        (begin(&[], &[spec("t", q4_0, &[2, 48])]), "whole blocks of 32"),
    ];
    for (result, part) in cases {
        assert!(matches!(result, Err(Error::Invalid { .. })), "{part}");
        assert_names(&text_of(result), &[part]);
    }
    let specs = [spec("a", f32, &[2]), spec("b", q4_0, &[2, 32])];
    let mut writer = begin(&[], &specs).unwrap();
    assert_names(&text_of(writer.write("c", &[])), &["declared", "`c`"]);
    assert_names(&text_of(writer.write("a", &[0; 7])), &["8 bytes for `a`"]);
    assert_names(&text_of(writer.write("b", &[0; 35])), &["36 bytes for `b`"]);
    writer.write("b", &[0; 36]).unwrap();
    assert_names(&text_of(writer.write("b", &[0; 36])), &["`b` again"]);
    assert_eq!(listing(dir.path()).len(), 1);
    assert_names(&text_of(writer.finish()), &["1 without", "`a`"]);
    assert!(listing(dir.path()).is_empty());

    drop(begin(&[], &specs).unwrap());
    assert!(listing(dir.path()).is_empty());
    std::fs::write(&path, "mine").unwrap();
    assert!(matches!(begin(&[], &specs), Err(Error::Exists { .. })));
    assert!(matches!(create(Path::new("/"), &[], &[]), Err(Error::Invalid { .. })));
    assert!(matches!(create(dir.path().join("no/m.gguf"), &[], &[]), Err(Error::Io { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
}

/// Rows of q and k go by heads, in both directions; numbers without a dimension are no rows.
#[test]
fn rows_that_are_no_whole_heads_are_refused() {
    let (bytes, header) = tiny();
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for shape in [&[][..], &[24, 64]] {
        let file = path(&format!("{}.gguf", shape.len()));
        let shape_of = |name: &str, own: &[usize]| if name == "blk.0.attn_k.weight" { shape } else { own }.to_vec();
        let specs: Vec<_> =
            header.tensors.iter().map(|t| spec(&t.name, t.ggml_type, &shape_of(&t.name, &t.shape))).collect();
        let mut writer = create(&file, &header.metadata, &specs).unwrap();
        for (tensor, spec) in header.tensors.iter().zip(&specs) {
            let size = spec.ggml_type.bytes_of(&spec.shape).unwrap();
            writer.write(&tensor.name, &bytes[tensor.range.clone()][..size]).unwrap();
        }
        writer.finish().unwrap();
        let got = format!("expected heads of 16 rows, got {shape:?}");
        assert_names(&text_of(Checkpoint::open(&file)), &["`blk.0.attn_k.weight`", &got]);
    }

    let source = Weights::open(testdata("gguf/tiny_llama.gguf")).unwrap();
    write_dense(Job::new(&source, &path("dense")), Float::F16).unwrap();
    let dense = Checkpoint::open(path("dense")).unwrap();
    let keys = "model.layers.0.self_attn.k_proj.weight";
    for (changed, shape, refused) in [
        (keys, &[][..], Some("expected whole heads of 16 rows, got []")),
        (keys, &[24, 64], Some("expected whole heads of 16 rows, got [24, 64]")),
        ("model.embed_tokens.weight", &[679, 64], Some("expected the 680 rows of vocab_size, got [679, 64]")),
        (keys, &[0, 64], Some("dimensions above 0")),
        ("model.norm.weight", &[0], Some("dimensions above 0")),
        ("model.norm.weight", &[], None),
    ] {
        let folder = path(&format!("{changed} {shape:?}"));
        let tensor = |name: &str| match name == changed {
            true => (changed.to_owned(), DType::F16, shape.to_vec(), vec![0; 2 * shape.iter().product::<usize>()]),
            false => taken(&dense, name, name),
        };
        std::fs::create_dir(&folder).unwrap();
        write_folder(&folder, &dense.tensor_names().map(tensor).collect::<Vec<_>>(), "");
        for beside in ["config.json", "tokenizer.json"] {
            std::fs::copy(path("dense").join(beside), folder.join(beside)).unwrap();
        }
        let target = Target::Gguf;
        let conversion = Conversion { target, bits: None, group: None, channel_scale: None, requantize: false };
        let converted = convert(Job::new(&Weights::open(&folder).unwrap(), &path("to.gguf")), conversion);
        match refused {
            Some(part) => assert_names(&text_of(converted), &[part]),
            None => _ = converted.unwrap(),
        }
    }
}
