//! State dicts that PyTorch saved, against what PyTorch reads from them.

mod build;
mod malicious;

use crate::gptq::{VERSIONS, all};
use crate::support::{Tensor, assert_names, listing, tensor, testdata, text_of, write_folder};
use halfbyte::{Float, Group};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{
    Checkpoint, Finding, Hint, Job, LinearWeight, Weights, inspect, linears, verify, write_dense,
};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    testdata("pytorch").join(name)
}

/// Type, shape and bytes of every tensor, by name.
fn contents(checkpoint: &Checkpoint) -> Vec<Tensor> {
    let mut tensors: Vec<Tensor> = checkpoint
        .tensors()
        .map(|info| {
            let data = checkpoint.data(info.name).unwrap().into_owned();
            assert_eq!(data.len(), info.bytes, "{}", info.name);
            (info.name.to_owned(), info.dtype, info.shape.to_vec(), data)
        })
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

fn read(name: &str) -> Checkpoint {
    Checkpoint::open(golden(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn tensors_of_every_type_are_what_torch_reads() {
    let expected = contents(&read("every_type.safetensors"));
    let zip = read("every_type.pt");
    assert_eq!(contents(&zip), expected);
    assert_eq!(zip.findings(), []);
    for (_, dtype, ..) in &expected {
        assert!(![DType::F4, DType::F6E2M3, DType::F6E3M2].contains(dtype));
    }
    let types: std::collections::HashSet<DType> = expected.iter().map(|(_, dtype, ..)| *dtype).collect();
    // Every type of safetensors but those of less than a byte, which torch has no storages of.
    assert_eq!(types.len(), DType::ALL.len() - 3);
    // Types that came after the legacy form are not in it.
    let legacy = contents(&read("every_type_legacy.pt"));
    let old: Vec<Tensor> = expected
        .into_iter()
        .filter(|(name, ..)| {
            !name.contains("float8") && !name.contains("uint16") && !name.contains("uint32") && !name.contains("uint64")
        })
        .collect();
    assert_eq!(legacy, old);
    assert_eq!(legacy.len(), 13);
}

#[test]
fn views_of_a_storage_are_what_torch_reads() {
    let expected = contents(&read("views.safetensors"));
    for name in ["views.pt", "views_legacy.pt"] {
        let checkpoint = read(name);
        assert_eq!(contents(&checkpoint), expected, "{name}");
        // Tied weights are two tensors in one place; what lies in its order is read in place, the rest copied.
        let place = |tensor: &str| checkpoint.bytes(tensor).unwrap().as_ptr();
        assert_eq!(place("embed.weight"), place("head.weight"), "{name}");
        for tensor in ["rows", "of_one"] {
            checkpoint.bytes(tensor).unwrap();
        }
        for tensor in ["transposed", "columns", "every_other", "permuted"] {
            assert_names(&text_of(checkpoint.bytes(tensor)), &[tensor, "expected elements in their order"]);
            checkpoint.release(tensor);
        }
    }
}

#[test]
fn a_module_is_one_in_every_form_of_file() {
    let expected = contents(&read("module.safetensors"));
    for name in ["module.pt", "module_protocol5.pt", "module_legacy.pt", "module_parameters.pt", "sharded"] {
        let checkpoint = read(name);
        assert_eq!(contents(&checkpoint), expected, "{name}");
        assert_eq!(checkpoint.findings(), [], "{name}");
    }
    for name in ["module_wrapped.pt", "module_wrapped_protocol4.pt"] {
        let checkpoint = read(name);
        assert_eq!(contents(&checkpoint), expected, "{name}");
        let [Finding { subject, text }] = checkpoint.findings() else { panic!("{:?}", checkpoint.findings()) };
        assert_eq!(subject, name);
        assert_names(
            text,
            &["under `model`", "`epoch` (an integer), `loss` (a float), `sizes` (a tuple), `note` (bytes)"],
        );
    }
    let text = text_of(Checkpoint::open(golden("two_state_dicts.pt")));
    assert_names(&text, &["two_state_dicts.pt", "expected one dict of tensors, found 2: `model`, `ema`"]);
}

/// A folder with these files of the test data.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (from, to) in files {
        std::fs::copy(golden(from), dir.path().join(to)).unwrap();
    }
    dir
}

#[test]
fn folders_prefer_safetensors_and_a_file_is_known_by_its_content() {
    let first = |files: &[(&str, &str)]| -> halfbyte_checkpoint::Result<String> {
        let dir = folder(files);
        let checkpoint = Checkpoint::open(dir.path())?;
        Ok(checkpoint.files().next().unwrap().file_name().unwrap().to_str().unwrap().to_owned())
    };
    let safetensors = ("module.safetensors", "model.safetensors");
    let bin = ("module.pt", "pytorch_model.bin");
    let pt = ("module_legacy.pt", "llama7b-4bit-128g.pt");
    assert_eq!(first(&[safetensors, bin, pt]).unwrap(), "model.safetensors");
    assert_eq!(first(&[bin, pt]).unwrap(), "pytorch_model.bin");
    assert_eq!(first(&[pt, ("module.pt", "optimizer.pt"), ("generate.py", "notes.bin")]).unwrap(), pt.1);
    assert_names(&text_of(first(&[pt, ("module.pt", "b.pth")])), &["expected one file of PyTorch's", "name the one"]);
    assert_names(&text_of(first(&[("generate.py", "notes.bin")])), &["pytorch_model.bin", "found none of them"]);
    assert_names(&text_of(first(&[("generate.py", "pytorch_model.bin")])), &["expected a file of PyTorch's"]);
    // Whatever a file is called.
    for (from, to) in
        [("module.pt", "weights"), ("module_legacy.pt", "weights.safetensors"), ("module.safetensors", "weights.pt")]
    {
        let dir = folder(&[(from, to)]);
        assert_eq!(contents(&Checkpoint::open(dir.path().join(to)).unwrap()).len(), 4, "{from} as {to}");
    }
    // Both a model and its index.
    let dir = folder(&[bin, ("sharded/pytorch_model.bin.index.json", "pytorch_model.bin.index.json")]);
    let findings = Checkpoint::open(dir.path()).unwrap().findings().to_vec();
    assert_names(&findings[0].to_string(), &["pytorch_model.bin.index.json", "the single file was read"]);
}

#[test]
fn shards_have_to_hold_what_their_index_says() {
    let names =
        ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"];
    let sharded = |from: [&str; 2]| {
        let index = format!("sharded/{}", names[2]);
        folder(&[(from[0], names[0]), (from[1], names[1]), (&index, names[2])])
    };
    let (one, two) = (format!("sharded/{}", names[0]), format!("sharded/{}", names[1]));
    assert_eq!(contents(&Checkpoint::open(sharded([&one, &two]).path()).unwrap()).len(), 4);
    assert_names(&text_of(Checkpoint::open(sharded([&two, &one]).path())), &["the index says", "lies in"]);
    assert_names(&text_of(Checkpoint::open(sharded([&one, &one]).path())), &["lies in", "too"]);
    let dir = sharded([&one, &two]);
    std::fs::remove_file(dir.path().join(names[1])).unwrap();
    assert_names(&text_of(Checkpoint::open(dir.path())), &[names[1], "names this shard; there is no such file"]);
}

const MODULE: &str = "model.layers.0.mlp.down_proj";

#[test]
fn gptq_without_a_config_is_read_by_its_shapes() {
    for (name, origin, group) in [
        ("gptq_w4_act.pt", "gptq_w4_g32_act", Group::Size(32)),
        ("gptq_w3.pt", "gptq_w3_g32", Group::Size(32)),
        ("gptq_w2_pc.pt", "gptq_w2_pc", Group::Channel),
        ("gptq_w8.pt", "gptq_w8_g32", Group::Size(32)),
    ] {
        let golden_module = all().into_iter().find(|golden| golden.name == origin).unwrap();
        let dir = tempfile::tempdir().unwrap();
        write_folder(
            dir.path(),
            &golden_module.tensors(VERSIONS[0].1),
            &golden_module.config("gptq", golden_module.sym),
        );
        let declared = Weights::open(dir.path()).unwrap();
        let expected = declared.load_linear("m").unwrap();
        let weights = Weights::open(golden(name)).unwrap();
        let linear = weights.load_linear(MODULE).unwrap();
        let (LinearWeight::Quantized(q), LinearWeight::Quantized(expected_q)) = (&linear.weight, &expected.weight)
        else {
            panic!("{name}: expected codes")
        };
        assert_eq!(q, expected_q, "{name}");
        assert_eq!(linear.bias, expected.bias, "{name}");
        assert_eq!((q.format().bits, q.format().group), (golden_module.bits, group), "{name}");
        let inspection = inspect(&weights).unwrap();
        assert_eq!(inspection.modules.len(), 1);
        assert_eq!(inspection.modules[0].shape, Some([golden_module.n, golden_module.k]));
    }
}

#[test]
fn modules_are_read_from_views() {
    let open = |name: &str| Weights::open(golden(name)).unwrap();
    let (views, whole) = (open("compressed_views.pt"), open("compressed_views.safetensors"));
    assert_eq!(whole.modules().len(), 2);
    let found = verify(&views, &whole, &mut |_, _, _| true).unwrap();
    assert!(found.equal() && found.elements == 8 * 16 + 8 * 64, "{found:?}");
}

/// A folder of a module with 192 inputs in two groups: twice 96, or 128 and 64.
fn two_readings(config: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (n, k) = (32, 192);
    let tensors = [
        tensor("m.qweight", DType::I32, &[k / 8, n], &vec![0x1234_5678i32; k / 8 * n]),
        tensor("m.qzeros", DType::I32, &[2, n / 8], &vec![0x7777_7777i32; 2 * n / 8]),
        tensor("m.scales", DType::F16, &[2, n], &[[half::f16::ONE; 32], [half::f16::from_f32(0.5); 32]]),
    ];
    write_folder(dir.path(), &tensors, config);
    dir
}

#[test]
fn two_readings_are_refused_unless_the_caller_says_which() {
    let load = |config: &str, group: Option<Group>| {
        let dir = two_readings(config);
        let weights = Weights::open_with(dir.path(), Hint { group, ..Hint::default() }).unwrap();
        match weights.load_linear("m")?.weight {
            LinearWeight::Quantized(q) => Ok(q.format().group),
            LinearWeight::Dense { .. } => panic!("expected codes"),
        }
    };
    // A config that leaves the size out says no more than none.
    for config in ["", r#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#] {
        let of = |group| load(config, group);
        assert_names(&text_of(of(None)), &["`m`", "groups of 96 and of 128 fit", "2 scales for 192 inputs", "--group"]);
        assert_names(&text_of(of(Some(Group::Size(64)))), &["groups of 96 and of 128"]);
        assert_names(&text_of(of(Some(Group::Channel))), &["groups of 96 and of 128"]);
        assert_eq!(of(Some(Group::Size(96))).unwrap(), Group::Size(96));
        assert_eq!(of(Some(Group::Size(128))).unwrap(), Group::Size(128));
    }
    // What the files say is not overruled.
    let said = r#"{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}"#;
    assert_eq!(load(said, Some(Group::Size(96))).unwrap(), Group::Size(128));
}

#[test]
fn float_zero_points_of_the_first_form_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = [
        tensor("m.qweight", DType::I32, &[4, 32], &[0i32; 128]),
        tensor("m.zeros", DType::F32, &[1, 32], &[1f32; 32]),
        tensor("m.scales", DType::F32, &[1, 32], &[1f32; 32]),
    ];
    write_folder(dir.path(), &tensors, "");
    let text = text_of(Weights::open(dir.path()).unwrap().load_linear("m"));
    assert_names(&text, &["`m`", "`zeros`", "GPTQ-for-LLaMa"]);
}

/// Writes what a model is into a new folder of safetensors.
fn dense(source: &Path, target: &Path) {
    let weights = Weights::open(source).unwrap();
    write_dense(Job::new(&weights, target), Float::F32).unwrap();
}

#[test]
fn verbs_take_such_folders_as_they_take_safetensors() {
    for name in ["gptq_w4_act.pt", "gptq_w3.pt", "views.pt"] {
        let dir = folder(&[(name, "pytorch_model.bin")]);
        std::fs::write(dir.path().join("config.json"), r#"{"architectures": ["X"]}"#).unwrap();
        let target = dir.path().join("dense");
        dense(dir.path(), &target);
        assert_eq!(listing(&target), ["config.json", "model.safetensors"]);
        let (source, written) = (Weights::open(dir.path()).unwrap(), Weights::open(&target).unwrap());
        assert!(!linears(&source).unwrap().is_empty(), "{name}");
        let found = verify(&source, &written, &mut |_, _, _| true).unwrap();
        assert!(found.equal() && found.compared > 0, "{name}: {found:?}");
    }
}
