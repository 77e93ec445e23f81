//! NVFP4 as ModelOpt exports it, against what its own functions make of the weights.

use crate::support::{Tensor, assert_names, taken, testdata, text_of, write_folder};
use halfbyte::format::reference::dequantize;
use halfbyte::{Float, Group, WeightFormat, Zero};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{
    Checkpoint, Conversion, Error, Job, LinearWeight, QuantizationConfig, Target, Weights, convert, inspect, verify,
};
use std::path::Path;

const FORMAT: WeightFormat =
    WeightFormat { bits: 8, group: Group::Size(16), zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
const MODULE: &str = "model.layers.0.mlp.down_proj";

fn tensors() -> Vec<Tensor> {
    let file = Checkpoint::open(testdata("modelopt/model.safetensors")).unwrap();
    file.tensors().map(|info| taken(&file, info.name, info.name)).collect()
}

/// The folder as it was exported, or with another config.
fn folder(dir: &Path, tensors: &[Tensor], config: &str) -> Weights {
    write_folder(dir, tensors, config);
    Weights::open(dir).unwrap()
}

fn assert_values(weights: &Weights) {
    let expected = Checkpoint::open(testdata("modelopt/expected.safetensors")).unwrap();
    let mut compared = 0;
    for info in expected.tensors() {
        let loaded = weights.load_linear(info.name).unwrap();
        assert_eq!(loaded.findings, [], "{}", info.name);
        let LinearWeight::Quantized(q) = loaded.weight else { panic!("{}: expected codes", info.name) };
        assert_eq!((&[q.n(), q.k()][..], q.format()), (info.shape, FORMAT), "{}", info.name);
        // Zeros of either sign are one code.
        let got: Vec<f32> = dequantize(&q).into_iter().map(|v| v as f32).collect();
        assert_eq!(got, expected.floats(info.name).unwrap().to_f32(), "{}", info.name);
        compared += 1;
    }
    assert_eq!(compared, 7);
}

#[test]
fn an_exported_model_is_read_to_its_bits() {
    let weights = Weights::open(testdata("modelopt")).unwrap();
    assert_values(&weights);
    let Some(QuantizationConfig::ModelOpt(config)) = weights.quantization() else { panic!("expected ModelOpt") };
    assert_eq!((config.algorithm.as_deref(), config.ignore.texts().len()), (Some("nvfp4"), 2));
    let findings = weights.findings();
    assert_eq!((findings.len(), findings[0].subject.as_str()), (1, "quantization_config"));
    assert_names(&findings[0].text, &["nvfp4 has activations in floats of 4 bits", "taken as they are"]);
    let inspection = inspect(&weights).unwrap();
    let mut modules: Vec<_> = inspection.modules.iter().map(|module| (module.scheme, module.format.as_str())).collect();
    modules.retain(|&(scheme, _)| scheme != "dense");
    assert_eq!(modules, [("modelopt", "w8a16-g16-sf32"); 7]);
    assert_eq!(inspection.findings, findings);
}

#[test]
fn a_config_of_its_own_and_none_are_read() {
    let (dir, tensors) = (tempfile::tempdir().unwrap(), tensors());
    let of_weights =
        r#"{"quantization": {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head", "model.embed*"]}}"#;
    std::fs::write(dir.path().join("hf_quant_config.json"), of_weights).unwrap();
    let weights = folder(dir.path(), &tensors, r#"{"architectures": ["LlamaForCausalLM"]}"#);
    assert_eq!(weights.findings(), []);
    assert_values(&weights);
    std::fs::remove_file(dir.path().join("hf_quant_config.json")).unwrap();
    let weights = Weights::open(dir.path()).unwrap();
    assert!(weights.quantization().is_none());
    assert_values(&weights);
}

#[test]
fn it_converts_to_forms_that_hold_its_scales() {
    let (weights, dir) = (Weights::open(testdata("modelopt")).unwrap(), tempfile::tempdir().unwrap());
    for target in [Target::Native, Target::CompressedTensors] {
        let to = dir.path().join(target.name());
        let conversion = Conversion { target, bits: None, group: None, channel_scale: None, requantize: false };
        convert(Job::new(&weights, &to), conversion).unwrap();
        assert!(!to.join("hf_quant_config.json").exists());
        let proof = verify(&weights, &Weights::open(&to).unwrap(), &mut |_, _, _| true).unwrap();
        assert!(proof.equal() && proof.compared > 0, "{}: {proof:?}", target.name());
    }
}

#[test]
fn configs_are_compared_with_the_tensors() {
    let (dir, tensors) = (tempfile::tempdir().unwrap(), tensors());
    let of = |fields: &str| format!(r#"{{"quantization_config": {{"quant_method": "modelopt", {fields}}}}}"#);
    let weights = folder(dir.path(), &tensors, &of(r#""quant_algo": "NVFP4", "ignore": ["*.down_proj"]"#));
    let findings = weights.load_linear(MODULE).unwrap().findings;
    assert_eq!(findings.len(), 1);
    assert_names(&findings[0].text, &["leaves it out (`*.down_proj`)", "read as quantised"]);
    // Of keys and values alone: weights are floats then.
    std::fs::write(dir.path().join("config.json"), of(r#""kv_cache_scheme": {"num_bits": 8}"#)).unwrap();
    let dense = Weights::open(dir.path()).unwrap();
    assert_eq!(dense.findings(), []);
    assert_eq!(dense.load_linear("lm_head").unwrap().findings, []);
    let findings = dense.load_linear(MODULE).unwrap().findings;
    assert_names(&findings[0].text, &["names no algorithm for weights", "read as quantised"]);
    for (fields, parts) in [
        (r#""quant_algo": "FP8""#, ["quantization_config.quant_algo `fp8`", "is not read", "nvfp4"]),
        (r#""quant_algo": 3"#, ["quantization_config.quant_algo", "expected a string", "got 3"]),
        (r#""quant_algo": "NVFP4", "ignore": 1"#, ["quantization_config.ignore", "a list of strings", "got 1"]),
    ] {
        std::fs::write(dir.path().join("config.json"), of(fields)).unwrap();
        assert_names(&text_of(Weights::open(dir.path())), &parts);
    }
    for text in ["{}", r#"{"quantization": []}"#] {
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        std::fs::write(dir.path().join("hf_quant_config.json"), text).unwrap();
        assert_names(
            &text_of(Weights::open(dir.path())),
            &["hf_quant_config.json", "`quantization`: expected an object"],
        );
    }
}

#[test]
fn tensors_that_do_not_fit_or_are_no_numbers_are_refused() {
    let refusal = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let (dir, mut tensors) = (tempfile::tempdir().unwrap(), tensors());
        change(&mut tensors);
        let error = folder(dir.path(), &tensors, "").load_linear(MODULE).unwrap_err();
        assert!(
            matches!(error, Error::Malformed { .. } | Error::Missing { .. } | Error::Unsupported { .. }),
            "{error}"
        );
        error.to_string()
    };
    fn part<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
        tensors.iter_mut().find(|(of, ..)| *of == format!("{MODULE}.{name}")).unwrap()
    }
    // Scales are [64, 6].
    for (told, parts) in [
        (refusal(&|t| part(t, "weight_scale").3[6 * 3 + 2] = 0x7f), ["weight_scale", "got 0x7f in row 3, group 2"]),
        (refusal(&|t| part(t, "weight_scale").3[0] = 0xb8), ["weight_scale", "got 0xb8 in row 0, group 0"]),
        (
            refusal(&|t| part(t, "weight_scale").2 = vec![6, 64]),
            ["weight_scale", "as `weight` is [64, 48], got [6, 64]"],
        ),
        (refusal(&|t| part(t, "weight_scale").1 = DType::U8), ["weight_scale", "a matrix of F8_E4M3, got U8"]),
        (refusal(&|t| part(t, "weight_scale_2").3.fill(0xff)), ["weight_scale_2", "of 1 values 1 are NaN"]),
        (
            refusal(&|t| (part(t, "weight_scale_2").2, part(t, "weight_scale_2").3) = (vec![2], vec![0; 8])),
            ["weight_scale_2", "one finite number of F32, got F32 [2]"],
        ),
        (
            refusal(&|t| part(t, "weight_scale_2").1 = DType::I32),
            ["weight_scale_2", "one finite number of F32, got I32"],
        ),
        (refusal(&|t| part(t, "weight").2 = vec![64 * 48]), ["weight", "a matrix of U8, got U8 [3072]"]),
        (refusal(&|t| t.retain(|(name, ..)| !name.ends_with("down_proj.weight_scale"))), ["weight_scale", MODULE]),
        (
            refusal(&|t| {
                t.push((format!("{MODULE}.pre_quant_scale"), DType::BF16, vec![96], vec![0; 192]));
            }),
            ["pre_quant_scale", "inputs are multiplied by are not read"],
        ),
    ] {
        assert_names(&told, &parts);
    }
}
