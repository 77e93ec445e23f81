//! Experts of GPT-OSS in MXFP4 against what transformers makes of them.

use crate::support::{Tensor, assert_names, taken, testdata, text_of, write_folder};
use halfbyte::format::reference::dequantize;
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero};
use halfbyte_checkpoint::config::Mxfp4Config;
use halfbyte_checkpoint::{
    Checkpoint, Conversion, Job, LinearWeight, QuantizationConfig, Target, Weights, convert, inspect, verify,
};

const EXPERTS: usize = 2;
const HIDDEN: usize = 64;
const INNER: usize = 32;

const FORMAT: WeightFormat =
    WeightFormat { bits: 8, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::BF16, channel_scale: None };

const CONFIG: &str = r#"{"quantization_config": {"quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}}"#;

fn golden() -> Checkpoint {
    Checkpoint::open(testdata("mxfp4/experts.safetensors")).unwrap()
}

fn tensors(file: &Checkpoint) -> Vec<Tensor> {
    let parts =
        ["gate_up_proj", "down_proj"].into_iter().flat_map(|name| ["blocks", "scales", "bias"].map(|p| (name, p)));
    parts
        .map(|(name, part)| {
            taken(file, &format!("{name}_{part}"), &format!("model.layers.0.mlp.experts.{name}_{part}"))
        })
        .collect()
}

fn codes(weights: &Weights, module: &str) -> (QTensor, Vec<f32>) {
    let loaded = weights.load_linear(&format!("model.layers.0.mlp.experts.{module}")).unwrap();
    assert_eq!(loaded.findings, [], "{module}");
    let LinearWeight::Quantized(q) = loaded.weight else { panic!("{module}: expected codes") };
    (q, loaded.bias.unwrap())
}

/// What transformers has, by expert, row and column; and where the row of a module lies there.
fn assert_golden(weights: &Weights) {
    let file = golden();
    let values = |name: &str| file.floats(name).unwrap().to_f32();
    for (module, stack, [n, k], (step, first)) in [
        ("gate_proj", "gate_up_proj", [INNER, HIDDEN], (2, 0)),
        ("up_proj", "gate_up_proj", [INNER, HIDDEN], (2, 1)),
        ("down_proj", "down_proj", [HIDDEN, INNER], (1, 0)),
    ] {
        let (expected, biases, rows) =
            (values(&format!("expected.{stack}")), values(&format!("{stack}_bias")), n * step);
        for expert in 0..EXPERTS {
            let (q, bias) = codes(weights, &format!("{expert}.{module}"));
            assert_eq!((q.n(), q.k(), q.format()), (n, k, FORMAT));
            for (at, got) in dequantize(&q).into_iter().enumerate() {
                let (row, column) = (at / k * step + first, at % k);
                let want = expected[(expert * k + column) * rows + row];
                // A code of minus zero stands for zero.
                assert_eq!(got, f64::from(want), "{expert}.{module}, row {row}, column {column}");
            }
            let own: Vec<f32> = (0..n).map(|i| biases[expert * rows + i * step + first]).collect();
            assert_eq!(bias, own, "{expert}.{module}");
        }
    }
}

#[test]
fn experts_are_read_to_the_bits_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), &tensors(&golden()), CONFIG);
    let weights = Weights::open(dir.path()).unwrap();
    assert_golden(&weights);
    let inspection = inspect(&weights).unwrap();
    assert_eq!(inspection.findings, []);
    assert_eq!(inspection.modules.len(), 3 * EXPERTS);
    for module in &inspection.modules {
        assert_eq!((module.scheme, module.format.as_str()), ("mxfp4", "w8a16-g32-sbf16"), "{}", module.name);
    }
    let Some(QuantizationConfig::Mxfp4(Mxfp4Config { modules_to_not_convert, .. })) = weights.quantization() else {
        panic!("the config")
    };
    assert_eq!(modules_to_not_convert.texts(), ["model.layers.*.self_attn", "lm_head"]);
}

/// Nothing is rounded, and a module each comes of it.
#[test]
fn experts_convert_to_forms_that_hold_their_scales() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    std::fs::create_dir(&from).unwrap();
    write_folder(&from, &tensors(&golden()), CONFIG);
    let weights = Weights::open(&from).unwrap();
    for target in [Target::Native, Target::CompressedTensors] {
        let to = dir.path().join(target.name());
        let conversion = Conversion { target, bits: None, group: None, channel_scale: None, requantize: false };
        assert_eq!(convert(Job::new(&weights, &to), conversion).unwrap().requantized, []);
        let converted = Weights::open(&to).unwrap();
        assert_golden(&converted);
        let proof = verify(&weights, &converted, &mut |_, _, _| true).unwrap();
        assert!(proof.equal(), "{}: {proof:?}", target.name());
    }
}

/// What the config says and the tensors do not.
#[test]
fn the_config_is_compared_with_the_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let config = CONFIG.replace("\"lm_head\"", "\"model.layers.0.mlp\"");
    write_folder(dir.path(), &tensors(&golden()), &config);
    let weights = Weights::open(dir.path()).unwrap();
    let findings = weights.load_linear("model.layers.0.mlp.experts.1.up_proj").unwrap().findings;
    assert_names(&findings[0].text, &["modules_to_not_convert", "model.layers.0.mlp", "read as quantised"]);
}

#[test]
fn scales_that_are_no_numbers_and_shapes_that_do_not_fit_are_refused() {
    let module = "model.layers.0.mlp.experts.1.gate_proj";
    let mut all = tensors(&golden());
    all[1].3[64 * 2 + 6 * 2 + 1] = 255;
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), &all, CONFIG);
    let weights = Weights::open(dir.path()).unwrap();
    assert_names(&text_of(weights.load_linear(module)), &["gate_proj.weight_scales", "NaN (255) in row 3, group 1"]);
    codes(&weights, "0.gate_proj");
    let mut all = tensors(&golden());
    all[4].2 = vec![2, 1, 64];
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), &all, CONFIG);
    assert_names(&text_of(Weights::open(dir.path())), &["down_proj_scales", "expected U8 [2, 64, 1]", "[2, 1, 64]"]);
    // As one module, by itself.
    let own = |blocks: &[usize], scales: &[usize]| {
        let bytes = |shape: &[usize]| vec![0x7fu8; shape.iter().product()];
        let tensors = [("weight_blocks", blocks), ("weight_scales", scales)]
            .map(|(part, shape)| (format!("m.{part}"), halfbyte_checkpoint::DType::U8, shape.to_vec(), bytes(shape)));
        let dir = tempfile::tempdir().unwrap();
        write_folder(dir.path(), &tensors, "");
        Weights::open(dir.path()).unwrap().load_linear("m").map(|_| ())
    };
    own(&[3, 32], &[3, 2]).unwrap();
    for (blocks, scales) in [([3, 31], [3, 2]), ([2, 32], [3, 2]), ([3, 0], [3, 0])] {
        assert_names(
            &text_of(own(&blocks, &scales)),
            &["m.weight_blocks", "expected U8 [3, 16", &format!("{blocks:?}")],
        );
    }
}
