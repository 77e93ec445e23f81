//! Marlin modules against files of AutoGPTQ's packer.

use crate::support::{Tensor, assert_names, load, refusal, taken, tensor, testdata, write_folder};
use half::f16;
use halfbyte::{Float, Group, WeightFormat, Zero};
use halfbyte_checkpoint::Checkpoint;
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{Job, Weights, inspect, write_dense};

/// Name, group size in the config, group that is read.
const GOLDENS: [(&str, i32, Group); 3] = [
    ("marlin_g128", 128, Group::Size(128)),
    ("marlin_pc", -1, Group::Channel),
    // One group, which the packer treats as a channel.
    ("marlin_g128_one_group", 128, Group::Size(128)),
];

fn golden(name: &str) -> Checkpoint {
    Checkpoint::open(testdata(&format!("marlin/{name}.safetensors"))).unwrap()
}

fn tensors(file: &Checkpoint, module: &str) -> Vec<Tensor> {
    let mut tensors: Vec<Tensor> =
        ["B", "s", "bias"].iter().map(|part| taken(file, part, &format!("{module}.{part}"))).collect();
    tensors.push(tensor(&format!("{module}.workspace"), DType::I32, &[32], &[0i32; 32]));
    tensors
}

fn config(group_size: i32) -> String {
    format!(
        r#"{{"quantization_config": {{"quant_method": "gptq", "bits": 4, "group_size": {group_size}, "sym": true,
        "desc_act": false, "is_marlin_format": true}}}}"#
    )
}

#[test]
fn files_of_another_program_are_read_to_their_exact_values() {
    for (name, group_size, group) in GOLDENS {
        let file = golden(name);
        let [k, n] = file.info("q").unwrap().shape.to_vec()[..] else { panic!("{name}") };
        let (q, bias, findings) = load(&tensors(&file, "m"), &config(group_size));
        assert_eq!(findings, [], "{name}");
        assert_eq!(
            q.format(),
            WeightFormat { bits: 4, group, zero: Zero::Symmetric, scale: Float::F16, channel_scale: None },
            "{name}"
        );
        let codes = file.bytes("q").unwrap();
        let scales = file.floats("scales").unwrap().to_f32();
        for i in 0..n {
            for j in 0..k {
                assert_eq!(q.codes()[i * k + j], codes[j * n + i], "{name} at {i}, {j}");
            }
            for g in 0..q.groups() {
                assert_eq!(q.scales()[i * q.groups() + g], scales[g * n + i], "{name} at {i}, group {g}");
            }
        }
        assert_eq!([q.n(), q.k()], [n, k]);
        assert_eq!(bias, file.floats("bias").unwrap().to_f32(), "{name}");

        // The tensors tell without a config.
        let (without, _, findings) = load(&tensors(&file, "m"), "");
        assert_eq!(findings, [], "{name}");
        assert_eq!((without.codes(), without.scales()), (q.codes(), q.scales()), "{name}");
    }
}

#[test]
fn labels_that_are_not_those_of_the_tensors_are_findings() {
    let file = golden("marlin_g128");
    let tensors = tensors(&file, "m");
    let (expected, ..) = load(&tensors, &config(128));
    let cases: &[(String, &[&str])] = &[
        (config(-1), &["group_size -1", "read as groups of 128"]),
        (config(64), &["group_size 64", "read as groups of 128"]),
        (config(128).replace("\"sym\": true", "\"sym\": false"), &["sym false", "read as symmetric"]),
        (
            config(128).replace("\"sym\"", r#""dynamic": {"+:m": {"bits": 8}}, "sym""#),
            &["8 bits for it", "read as 4 bits"],
        ),
        (config(128).replace("\"is_marlin_format\": true", "\"lm_head\": false"), &["says gptq", "read as marlin"]),
        (config(128).replace("\"sym\"", r#""dynamic": {"-:m": {}}, "sym""#), &["leaves it out", "read as quantised"]),
    ];
    for (config, parts) in cases {
        let (q, _, findings) = load(&tensors, config);
        assert_eq!(q, expected, "{config}");
        assert_eq!(findings.len(), 1, "{config}: {findings:?}");
        assert_names(&findings[0].text, parts);
    }
    // An order of columns would be lost.
    let act_order = config(128).replace("\"desc_act\": false", "\"desc_act\": true");
    assert_names(&refusal(&tensors, &act_order), &["`m`", "desc_act", "no g_idx"]);
    let (q, _, findings) = load(&tensors, &act_order.replace("\"sym\"", "\"static_groups\": true, \"sym\""));
    assert_eq!((q, findings), (expected, vec![]));
    // In one group no order is lost.
    assert_eq!(load(&self::tensors(&golden("marlin_pc"), "m"), &act_order).2, []);
    let (_, _, findings) = load(&self::tensors(&golden("marlin_pc"), "m"), &config(64));
    assert_names(&findings[0].text, &["group_size 64", "read as one group"]);
    // GPTQ's own tensors under this label.
    let gptq = Checkpoint::open(testdata("gptq/gptq_w4_g32_sym.safetensors")).unwrap();
    let parts = [("qweight", "m.qweight"), ("v1.qzeros", "m.qzeros"), ("scales", "m.scales"), ("g_idx", "m.g_idx")];
    let (_, _, findings) = load(&parts.map(|(from, to)| taken(&gptq, from, to)), &config(32));
    assert_names(&findings[0].text, &["says marlin", "read as gptq"]);
}

#[test]
fn tensors_that_do_not_fit_each_other_are_errors_that_name_them() {
    let good = tensors(&golden("marlin_g128"), "m");
    let ints = |name: &str, shape: &[usize]| tensor(name, DType::I32, shape, &vec![0i32; shape.iter().product()]);
    let halves = |name: &str, shape: &[usize]| tensor(name, DType::F16, shape, &vec![f16::ONE; shape.iter().product()]);
    let cases: Vec<(usize, Tensor, &[&str])> = vec![
        (0, ints("m.B", &[16 * 512]), &["`m.B`", "matrix of I32"]),
        (0, ints("m.B", &[12, 512]), &["`m.B`", "multiple of 128", "[12, 512]"]),
        (0, ints("m.B", &[16, 384]), &["`m.B`", "outputs of 256", "[16, 384]"]),
        (0, ints("m.B", &[16, 513]), &["`m.B`", "[16, 513]"]),
        (0, ints("m.B", &[0, 512]), &["`m.B`", "[0, 512]"]),
        (0, ints("m.B", &[16, 0]), &["`m.B`", "[16, 0]"]),
        (0, ints("m.B", &[8, 512]), &["`m.s`", "[1, 256]", "128 inputs", "got F16 [2, 256]"]),
        (0, ints("m.B", &[16, 1024]), &["`m.s`", "[2, 512]"]),
        (1, halves("m.s", &[4, 256]), &["`m.s`", "[2, 256]", "[4, 256]"]),
        (1, halves("m.s", &[0, 256]), &["`m.s`", "[0, 256]"]),
        (1, halves("m.s", &[512]), &["`m.s`", "[512]"]),
        (1, ints("m.s", &[2, 256]), &["`m.s`", "expected floats", "I32"]),
        (1, tensor("m.s", DType::F16, &[2, 256], &[f16::INFINITY; 512]), &["`m`", "finite"]),
        (2, halves("m.bias", &[255]), &["`m.bias`", "[255]"]),
    ];
    for (at, replacement, parts) in cases {
        let mut tensors = good.clone();
        tensors[at] = replacement;
        assert_names(&refusal(&tensors, &config(128)), parts);
    }
    // Without one of the two, or with another type, it is no module of Marlin's.
    assert_names(&refusal(&good[1..], &config(128)), &["no module `m`"]);
    let mut floats = good.clone();
    floats[0] = halves("m.B", &[16, 512]);
    assert_names(&refusal(&floats, &config(128)), &["no module `m`"]);
    let mut both = good;
    both.push(halves("m.weight", &[256, 256]));
    assert_names(&refusal(&both, &config(128)), &["`m`", "either `weight` or `B`"]);
}

#[test]
fn a_model_with_a_quantised_head_is_described_and_made_dense() {
    let file = golden("marlin_pc");
    let mut all = tensors(&file, "model.layers.0.mlp.down_proj");
    all.extend(tensors(&file, "lm_head"));
    all.push(tensor("model.norm.weight", DType::F16, &[4], &[f16::ONE; 4]));
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("marlin");
    std::fs::create_dir(&source).unwrap();
    write_folder(&source, &all, &config(-1).replace("\"sym\"", "\"lm_head\": true, \"sym\""));
    let weights = Weights::open(&source).unwrap();
    let inspection = inspect(&weights).unwrap();
    assert_eq!(inspection.findings, []);
    assert_eq!(inspection.modules.len(), 2);
    for module in &inspection.modules {
        assert_eq!((module.scheme, module.format.as_str(), module.shape), ("marlin", "w4a16", Some([512, 128])));
    }
    assert_eq!(inspection.parameters, 2 * (512 * 128 + 512) + 4);
    let target = dir.path().join("dense");
    write_dense(Job::new(&weights, &target), Float::F16).unwrap();
    let dense = Checkpoint::open(&target).unwrap();
    let names: Vec<&str> = dense.tensor_names().collect();
    assert_eq!(names.len(), 5, "{names:?}");
    let written = dense.floats("lm_head.weight").unwrap().to_f32();
    let (codes, scales) = (file.bytes("q").unwrap(), file.floats("scales").unwrap().to_f32());
    for (at, &value) in written.iter().enumerate() {
        let (i, j) = (at / 128, at % 128);
        let expected = f16::from_f32(scales[i] * (f32::from(codes[j * 512 + i]) - 8.0)).to_f32();
        assert_eq!(value, expected, "at {i}, {j}");
    }
}
