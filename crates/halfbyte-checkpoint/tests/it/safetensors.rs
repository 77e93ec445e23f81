//! The container: reading, writing, and agreement with the reference implementation.

use crate::support::{assert_names, listing, model, tensor, text_of, write_folder};
use half::{bf16, f16};
use halfbyte::Floats;
use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_checkpoint::{Checkpoint, DType, Error, FloatData};
use safetensors::SafeTensors;

fn spec(name: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), dtype, shape: shape.to_vec() }
}

#[test]
fn the_model_that_ships_is_read_as_the_reference_implementation_reads_it() {
    let checkpoint = Checkpoint::open(model()).unwrap();
    assert_eq!(checkpoint.files().count(), 2);
    assert_eq!(checkpoint.findings(), []);
    let mut count = 0;
    for file in checkpoint.files() {
        let bytes = std::fs::read(file).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let info = checkpoint.info(name).unwrap();
            assert_eq!((info.shape, info.file), (view.shape(), file), "{name}");
            assert_eq!(checkpoint.bytes(name).unwrap(), view.data(), "{name}");
            assert_eq!(info.bytes, view.data().len());
            count += 1;
        }
    }
    assert_eq!((count, checkpoint.tensor_names().count()), (56, 56));
    let norm = checkpoint.floats("model.norm.weight").unwrap();
    assert!(matches!(norm.as_floats(), Floats::F16(v) if v.len() == 384));
    assert_names(&text_of(checkpoint.info("model.nothing")), &["stdlib-11m", "`model.nothing`"]);
    assert_names(&text_of(checkpoint.ints("model.norm.weight")), &["`model.norm.weight`", "expected I32, got F16"]);
}

#[test]
fn every_type_has_a_name_and_comes_back() {
    for &dtype in DType::ALL {
        assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..dtype.bytes_of(&[2, 4]).unwrap() as u8).collect();
        write_folder(dir.path(), &[("t".into(), dtype, vec![2, 4], bytes.clone())], "");
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!((checkpoint.info("t").unwrap().dtype, checkpoint.bytes("t").unwrap()), (dtype, bytes.as_slice()));
        // The reference implementation agrees on the name and the size.
        let file = std::fs::read(dir.path().join("model.safetensors")).unwrap();
        assert_eq!(SafeTensors::deserialize(&file).unwrap().tensor("t").unwrap().data(), bytes);
    }
    assert_eq!(DType::from_name("Q4_0"), None);
}

#[test]
fn unaligned_elements_are_copied_and_aligned_ones_are_not() {
    // A header of odd length puts everything at odd addresses.
    for padding in 0..4 {
        let header = format!(
            r#"{{"f":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"h":{{"dtype":"F16","shape":[2],"data_offsets":[8,12]}},"i":{{"dtype":"I32","shape":[1],"data_offsets":[12,16]}},"b":{{"dtype":"BF16","shape":[1],"data_offsets":[16,18]}}}}{}"#,
            " ".repeat(padding)
        );
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        let aligned = bytes.len().is_multiple_of(4);
        bytes.extend(bytemuck::bytes_of(&[1.5f32, -2.5]));
        bytes.extend(bytemuck::bytes_of(&[f16::from_f32(0.5), f16::NAN]));
        bytes.extend((-7i32).to_le_bytes());
        bytes.extend(bf16::from_f32(3.0).to_le_bytes());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        std::fs::write(&path, bytes).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let FloatData::F32(f) = checkpoint.floats("f").unwrap() else { panic!() };
        assert_eq!(matches!(f, std::borrow::Cow::Borrowed(_)), aligned);
        assert_eq!(*f, [1.5, -2.5]);
        assert_eq!(checkpoint.floats("h").unwrap().as_floats().get(0), 0.5);
        assert!(checkpoint.floats("h").unwrap().as_floats().get(1).is_nan());
        assert_eq!(*checkpoint.ints("i").unwrap(), [-7]);
        assert_eq!(checkpoint.floats("b").unwrap().to_f32(), [3.0]);
        assert_names(&text_of(checkpoint.floats("i")), &["x.safetensors", "`i`", "got I32"]);
    }
}

#[test]
fn shards_are_filled_in_order_and_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let specs = [
        spec("a", DType::F16, &[3]),
        spec("b", DType::I32, &[2, 2]),
        spec("empty", DType::F32, &[0, 7]),
        spec("large", DType::U8, &[100]),
        spec("scalar", DType::F32, &[]),
        spec("c", DType::BF16, &[5]),
    ];
    let data: Vec<Vec<u8>> = specs
        .iter()
        .enumerate()
        .map(|(i, s)| (0..s.dtype.bytes_of(&s.shape).unwrap()).map(|b| (b * 7 + i) as u8).collect())
        .collect();
    let mut writer = create(dir.path(), &specs, 30).unwrap();
    // In any order.
    for i in [5, 0, 3, 2, 1, 4] {
        writer.write(&specs[i].name, &data[i]).unwrap();
    }
    assert!(listing(dir.path()).iter().all(|name| name.starts_with('.') && name.ends_with(".tmp")));
    let written = writer.finish().unwrap();
    assert_eq!(written.tensor_bytes, 6 + 16 + 100 + 4 + 10);
    let names =
        ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"];
    assert_eq!(listing(dir.path()), [names[0], names[1], names[2], "model.safetensors.index.json"]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.findings(), []);
    for (spec, data) in specs.iter().zip(&data) {
        let info = checkpoint.info(&spec.name).unwrap();
        assert_eq!((info.dtype, info.shape), (spec.dtype, spec.shape.as_slice()));
        assert_eq!(checkpoint.bytes(&spec.name).unwrap(), data);
    }
    let shard_of = |name: &str| checkpoint.info(name).unwrap().file.file_name().unwrap().to_str().unwrap();
    assert_eq!(
        [shard_of("a"), shard_of("b"), shard_of("large"), shard_of("c")],
        [names[0], names[0], names[1], names[2]]
    );
    // Every tensor is aligned to its elements, as readers that do not copy need.
    for (file, base) in checkpoint.files().map(|f| (f, std::fs::read(f).unwrap())) {
        let (header, tensors) = SafeTensors::read_metadata(&base).unwrap();
        for (name, info) in tensors.tensors() {
            let at = 8 + header + info.data_offsets.0;
            assert_eq!(at * 8 % info.dtype.bitsize(), 0, "{name} in {}", file.display());
        }
    }
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 136);
    assert_eq!(index["weight_map"]["large"], names[1]);
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let specs = [spec("a", DType::U8, &[4]), spec("b", DType::U8, &[4])];
    for written in 0..=2 {
        let mut writer = create(dir.path(), &specs, 4).unwrap();
        for s in &specs[..written] {
            writer.write(&s.name, &[1; 4]).unwrap();
        }
        assert_eq!(listing(dir.path()).len(), 2);
        drop(writer);
        assert_eq!(listing(dir.path()), [""; 0]);
    }
    // The same if it is finished too early.
    let mut writer = create(dir.path(), &specs, u64::MAX).unwrap();
    writer.write("b", &[1; 4]).unwrap();
    assert_names(&text_of(writer.finish()), &["1 without", "`a`"]);
    assert_eq!(listing(dir.path()), [""; 0]);
    // And if the renaming fails: a folder lies where the index has to go.
    let mut writer = create(dir.path(), &specs, 4).unwrap();
    specs.iter().for_each(|s| writer.write(&s.name, &[1; 4]).unwrap());
    std::fs::create_dir(dir.path().join("model.safetensors.index.json")).unwrap();
    assert_names(&text_of(writer.finish()), &["model.safetensors.index.json"]);
    assert_eq!(listing(dir.path()), ["model.safetensors.index.json"]);
}

#[test]
fn wrong_use_of_a_writer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let a = spec("a", DType::F16, &[2]);
    let create = |specs: &[TensorSpec]| create(dir.path(), specs, 100);
    assert_names(&text_of(create(&[a.clone(), a.clone()])), &["`a`"]);
    assert_names(&text_of(create(&[spec("__metadata__", DType::U8, &[1])])), &["`__metadata__`"]);
    assert_names(&text_of(create(&[spec("", DType::U8, &[1])])), &["not empty"]);
    assert_names(&text_of(create(&[spec("big", DType::F32, &[usize::MAX, 2])])), &["`big`"]);
    assert_names(&text_of(create(&[spec("half", DType::F4, &[3])])), &["`half`"]);
    let mut writer = create(std::slice::from_ref(&a)).unwrap();
    assert_names(&text_of(writer.write("b", &[])), &["`b`"]);
    assert_names(&text_of(writer.write("a", &[0; 3])), &["4 bytes for `a`", "3"]);
    writer.write("a", &[0; 4]).unwrap();
    assert_names(&text_of(writer.write("a", &[0; 4])), &["`a` again"]);
    writer.finish().unwrap();
    let error = create(&[a]).unwrap_err();
    assert!(matches!(error, Error::Exists { .. }));
    assert_names(&error.to_string(), &["model.safetensors", "already exists"]);
    assert_eq!(listing(dir.path()), ["model.safetensors"]);
}

#[test]
fn oddities_of_folders_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let specs = [spec("a", DType::U8, &[4]), spec("b", DType::U8, &[4])];
    let mut writer = create(dir.path(), &specs, 4).unwrap();
    specs.iter().for_each(|s| writer.write(&s.name, &[1; 4]).unwrap());
    writer.finish().unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    // A shard with a tensor that the index does not list.
    write_folder(dir.path(), &[tensor("a", DType::U8, &[4], &[1u8; 4]), tensor("extra", DType::U8, &[1], &[1u8])], "");
    std::fs::rename(dir.path().join("model.safetensors"), dir.path().join("model-00001-of-00002.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.contains("extra"));
    assert_eq!(checkpoint.findings().len(), 1);
    assert_names(&checkpoint.findings()[0].to_string(), &["extra", "not in the index", "model-00001-of-00002"]);
    // A single file beside an index.
    std::fs::write(&index, text).unwrap();
    write_folder(dir.path(), &[tensor("single", DType::U8, &[1], &[1u8])], "");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["single"]);
    assert_eq!(checkpoint.findings().len(), 1);
    assert_names(&checkpoint.findings()[0].to_string(), &["index", "the single file was read"]);
    // And beside other files without one.
    std::fs::remove_file(&index).unwrap();
    let told: Vec<String> = Checkpoint::open(dir.path()).unwrap().findings().iter().map(ToString::to_string).collect();
    let others = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    assert_eq!(told, others.map(|name| format!("{name}: lies beside model.safetensors, which was read alone")));
}

#[cfg(target_os = "linux")]
#[test]
fn released_tensors_do_not_stay_resident() {
    const BYTES: usize = 32 << 20;
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), &[tensor("t", DType::U8, &[BYTES], &vec![1u8; BYTES])], "");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let path = dir.path().join("model.safetensors").canonicalize().unwrap();
    let resident_kb = || -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping = smaps.split_once(path.to_str().unwrap()).unwrap().1;
        let line = mapping.lines().find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let sum = || checkpoint.bytes("t").unwrap().iter().map(|&b| usize::from(b)).sum::<usize>();
    assert_eq!(sum(), BYTES);
    assert!(resident_kb() >= BYTES >> 10);
    checkpoint.release("t");
    assert!(resident_kb() <= 256, "{} kB are still resident", resident_kb());
    checkpoint.release("no such tensor");
    assert_eq!(sum(), BYTES, "the bytes are read again");
}
