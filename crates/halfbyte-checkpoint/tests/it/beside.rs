//! What lies beside the parts of quantised modules: biases that are none, parts of other schemes, scales of activations, rotary
//! frequencies. It is told, and compared; nothing goes without a word.

use crate::gptq::{random, tensors_of};
use crate::support::{Tensor, assert_names, model, taken, tensor, text_of, write_folder};
use half::f16;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{
    Checkpoint, Conversion, Converted, GptqVersion, Job, LinearWeight, Quantization, Target, Verification, Weights,
    convert, inspect, verify, write_dense, write_model,
};
use std::path::{Path, PathBuf};

const FORMAT: WeightFormat =
    WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };

const GPTQ: &str = r#"{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true}}"#;

/// A module `h.0.m` of GPTQ, of 32 outputs and 64 inputs, with other tensors beside it.
fn with(others: &[Tensor], folder: PathBuf) -> Weights {
    let q: QTensor = random(5, FORMAT, [32, 64], false);
    let of_module = tensors_of(&q, GptqVersion::V1).into_iter();
    let of_module = of_module.map(|(part, dtype, shape, data)| (format!("h.0.m{}", &part[1..]), dtype, shape, data));
    let tensors: Vec<Tensor> = of_module.chain(others.iter().cloned()).collect();
    std::fs::create_dir(&folder).unwrap();
    write_folder(&folder, &tensors, GPTQ);
    Weights::open(&folder).unwrap()
}

fn findings(weights: &Weights) -> Vec<String> {
    inspect(weights).unwrap().findings.iter().map(ToString::to_string).collect()
}

fn compare(a: &Weights, b: &Weights) -> Verification {
    verify(a, b, &mut |_, _, _| true).unwrap()
}

fn converted(source: &Weights, to: &Path, target: Target) -> halfbyte_checkpoint::Result<Converted> {
    let conversion = Conversion { target, bits: None, group: None, channel_scale: None, requantize: false };
    convert(Job::new(source, to), conversion)
}

#[test]
fn a_bias_that_cannot_be_read_is_a_finding() {
    let dir = tempfile::tempdir().unwrap();
    const BIAS: &str = "h.0.m.bias";
    let cases = [
        (tensor(BIAS, DType::I32, &[32], &[1i32; 32]), "expected floats (F16, BF16 or F32), got I32"),
        (tensor(BIAS, DType::F16, &[3], &[f16::ONE; 3]), "expected shape [32], got [3]"),
        (tensor(BIAS, DType::F16, &[32, 1], &[f16::ONE; 32]), "expected shape [32], got [32, 1]"),
        (tensor(BIAS, DType::F32, &[3], &[0f32; 3]), "expected shape [32], got [3]"),
    ];
    for (at, (bias, what)) in cases.into_iter().enumerate() {
        let weights = with(&[bias], dir.path().join(at.to_string()));
        let [told] = findings(&weights).try_into().unwrap();
        assert_names(&told, &["h.0.m: ", "tensor `h.0.m.bias`", what]);
        assert!(weights.load_linear("h.0.m").is_err());
    }
    let good = with(&[tensor(BIAS, DType::F32, &[32], &[1f32; 32])], dir.path().join("good"));
    assert_eq!(findings(&good), [""; 0]);
}

#[test]
fn a_bias_of_zeros_is_none_whatever_their_sign() {
    let dir = tempfile::tempdir().unwrap();
    let none = with(&[], dir.path().join("none"));
    let bias =
        |name: &str, value: f32| with(&[tensor("h.0.m.bias", DType::F32, &[32], &[value; 32])], dir.path().join(name));
    let negative = bias("negative", -0.0);
    for (a, b) in [(&none, &negative), (&negative, &none), (&negative, &bias("zero", 0.0))] {
        assert!(compare(a, b).equal());
    }
    assert!(findings(&negative)[0].contains("zero throughout"));
    assert_eq!(compare(&none, &bias("one", 1.0)).only_in_second, ["h.0.m.bias"]);
}

#[test]
fn tensors_of_other_types_differ_even_where_their_bytes_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, other: Tensor| with(&[other], dir.path().join(name));
    let unsigned = of("u8", tensor("t", DType::U8, &[2], &[200u8, 7]));
    assert!(compare(&unsigned, &unsigned).equal());
    for (name, other, type_of) in [
        ("i8", tensor("t", DType::I8, &[2], &[-56i8, 7]), "I8"),
        ("f32", tensor("t", DType::F32, &[2], &[200f32, 7.0]), "F32"),
        ("i32", tensor("t", DType::I32, &[2], &[200i32, 7]), "I32"),
    ] {
        let [found] = compare(&unsigned, &of(name, other)).differing.try_into().unwrap();
        assert_eq!((found.types, found.largest, found.elements), (Some(["U8", type_of]), None, 2));
    }
    // Types of floats may differ.
    let [single, half] = [
        of("single", tensor("t", DType::F32, &[1], &[0.5f32])),
        of("half", tensor("t", DType::F16, &[1], &[f16::from_f32(0.5)])),
    ];
    assert!(compare(&single, &half).equal());
}

#[test]
fn parts_of_other_schemes_are_told_and_compared_and_taken_over_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let none = with(&[], dir.path().join("none"));
    let [scb, scale] = ["h.0.m.SCB", "h.0.m.input_scale"];
    let [of_scb, of_scale] = [scb, scale].map(|name| tensor(name, DType::F32, &[1], &[0.5f32]));
    // Nothing of bitsandbytes, which does not read the module.
    let both = with(&[of_scb, of_scale.clone()], dir.path().join("both"));
    assert_eq!(findings(&both), ["h.0.m: has SCB, input_scale, which modules of gptq have not; not read"]);
    assert_eq!(compare(&none, &both).only_in_second, [scb, scale]);
    let one = with(&[of_scale], dir.path().join("one"));
    for target in [Target::Native, Target::CompressedTensors] {
        let refused = text_of(converted(&both, &dir.path().join("refused"), target));
        assert_names(&refused, &["tensor `h.0.m.SCB`", "modules of gptq have none of this name"]);
        let to = dir.path().join(target.name());
        assert_eq!(converted(&one, &to, target).unwrap().written.left_out, [""; 0]);
        let to = Weights::open(&to).unwrap();
        assert!(to.checkpoint().contains(scale) && compare(&one, &to).equal());
    }
    let refused = write_dense(Job::new(&both, &dir.path().join("refused")), Float::F32).map(drop);
    assert_names(&text_of(refused), &["tensor `h.0.m.SCB`"]);
}

#[test]
fn scales_of_activations_are_told_compared_and_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, scale: Option<f32>| {
        let codes: Vec<i8> = (0..32 * 64).map(|i| (i % 251) as i8).collect();
        let mut tensors = vec![
            tensor("h.0.m.weight", DType::I8, &[32, 64], &codes),
            tensor("h.0.m.weight_scale", DType::F32, &[32, 1], &[0.25f32; 32]),
        ];
        if let Some(scale) = scale {
            tensors.push(tensor("h.0.m.input_scale", DType::F32, &[1], &[scale]));
            tensors.push(tensor("h.0.m.input_zero_point", DType::I8, &[1], &[3i8]));
        }
        let folder = dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        write_folder(&folder, &tensors, "{}");
        Weights::open(&folder).unwrap()
    };
    let (none, rounded, other) = (of("none", None), of("rounded", Some(0.5)), of("other", Some(9.0)));
    let names = ["h.0.m.input_scale", "h.0.m.input_zero_point"];
    assert_eq!(findings(&none), [""; 0]);
    let [told] = findings(&rounded).try_into().unwrap();
    assert_names(&told, &["h.0.m.input_scale: and 1 other say how activations are rounded to integers"]);
    assert_eq!(compare(&rounded, &none).only_in_first, names);
    let [found] = compare(&rounded, &other).differing.try_into().unwrap();
    assert_eq!((found.name.as_str(), found.at), (names[0], Some((0, 0.5, 9.0))));
    for target in [Target::Native, Target::CompressedTensors] {
        let to = dir.path().join(target.name());
        assert_eq!(converted(&rounded, &to, target).unwrap().written.left_out, names);
        let found = compare(&rounded, &Weights::open(&to).unwrap());
        assert_eq!((found.only_in_first.as_slice(), found.differing.len()), (&names.map(str::to_owned)[..], 0));
    }
}

#[test]
fn rotary_frequencies_are_left_out_where_the_config_gives_them() {
    const NAME: &str = "model.layers.0.self_attn.rotary_emb.inv_freq";
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, base: f32| {
        let published = Checkpoint::open(model()).unwrap();
        let names: Vec<&str> = published.tensor_names().collect();
        let frequencies: Vec<f32> = (0..32).map(|i| 1.0 / base.powf(i as f32 / 32.0)).collect();
        let own = tensor(NAME, DType::F32, &[32], &frequencies);
        let tensors: Vec<Tensor> = names.iter().map(|name| taken(&published, name, name)).chain([own]).collect();
        let folder = dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        write_folder(&folder, &tensors, &std::fs::read_to_string(model().join("config.json")).unwrap());
        std::fs::copy(model().join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
        Weights::open(&folder).unwrap()
    };
    let (own, other) = (of("own", 10_000.0), of("other", 20_000.0));
    let file = dir.path().join("own.gguf");
    assert_eq!(converted(&own, &file, Target::Gguf).unwrap().written.left_out, [NAME]);
    let file = Weights::open(&file).unwrap();
    assert!(compare(&own, &file).equal() && compare(&file, &own).equal());
    let refused = text_of(converted(&other, &dir.path().join("other.gguf"), Target::Gguf));
    assert_names(&refused, &[NAME, "gguf cannot hold it", "not the rotary frequencies that the config gives"]);
    assert_eq!(compare(&other, &file).only_in_first, [NAME]);
    assert_eq!(compare(&file, &other).only_in_second, [NAME]);
    assert_eq!(compare(&own, &other).differing.len(), 1);
}

/// Readers of GGUF take an output for the head, whatever the config said.
#[test]
fn a_head_beside_an_embedding_that_is_the_head_is_left_out_of_gguf() {
    const HEAD: &str = "lm_head.weight";
    let dir = tempfile::tempdir().unwrap();
    let published = Checkpoint::open(model()).unwrap();
    let names: Vec<&str> = published.tensor_names().collect();
    let mut tensors: Vec<Tensor> = names.iter().map(|name| taken(&published, name, name)).collect();
    tensors.push(taken(&published, "model.embed_tokens.weight", HEAD));
    let (folder, file) = (dir.path().join("tied"), dir.path().join("tied.gguf"));
    std::fs::create_dir(&folder).unwrap();
    write_folder(&folder, &tensors, &std::fs::read_to_string(model().join("config.json")).unwrap());
    std::fs::copy(model().join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    let source = Weights::open(&folder).unwrap();
    let written = converted(&source, &file, Target::Gguf).unwrap().written;
    assert_eq!(written.left_out, [HEAD]);
    let told: Vec<String> = written.findings.iter().map(ToString::to_string).collect();
    assert!(told.iter().any(|told| told.contains(HEAD) && told.contains("tie_word_embeddings")), "{told:?}");
    let file = Weights::open(&file).unwrap();
    assert!(!file.checkpoint().contains(HEAD) && compare(&source, &file).only_in_first == [HEAD]);
}

#[test]
fn act_order_is_rounded_again_where_the_form_has_no_group_index() {
    let dir = tempfile::tempdir().unwrap();
    let q: QTensor = random(5, FORMAT, [32, 64], true);
    assert!(q.group_index().is_some());
    let of_module = tensors_of(&q, GptqVersion::V1).into_iter();
    let tensors: Vec<Tensor> =
        of_module.map(|(part, dtype, shape, data)| (format!("h.0.m{}", &part[1..]), dtype, shape, data)).collect();
    let folder = dir.path().join("ordered");
    std::fs::create_dir(&folder).unwrap();
    write_folder(&folder, &tensors, GPTQ);
    let source = Weights::open(&folder).unwrap();
    let to = dir.path().join("to");
    assert_names(&text_of(converted(&source, &to, Target::CompressedTensors)), &["h.0.m", "no act-order"]);
    let target = Target::CompressedTensors;
    let again = Conversion { target, bits: None, group: None, channel_scale: None, requantize: true };
    let rounded = convert(Job::new(&source, &to), again).unwrap().requantized;
    assert!(matches!(&rounded[..], [(name, why)] if name == "h.0.m" && why.contains("act-order")), "{rounded:?}");
}

#[test]
fn scales_that_f16_holds_coarsely_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, factor: f32| {
        // Rows of zeros have scales of 0, and lose nothing.
        let w: Vec<f32> = (0..32 * 64).map(|i| if i < 64 { 0.0 } else { factor * (i % 7) as f32 }).collect();
        let folder = dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        write_folder(&folder, &[tensor("h.0.m.weight", DType::F32, &[32, 64], &w)], "{}");
        let (source, to) = (Weights::open(&folder).unwrap(), dir.path().join(format!("{name}-4")));
        let quantization = Quantization {
            target: Target::Native,
            format: &mut |_| Some(FORMAT),
            quantize: &mut |_, weight, format| {
                let LinearWeight::Dense { floats, shape } = weight else { panic!("codes") };
                rtn(floats.as_floats(), *shape, format, Rtn::default())
            },
            dense: &mut |_| None,
            untied: None,
        };
        let findings = write_model(Job::new(&source, &to), quantization).unwrap().findings;
        findings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(of("usual", 1e-2), [""; 0]);
    let [told] = of("small", 1e-5).try_into().unwrap();
    assert_names(&told, &["h.0.m: 62 of 64 scales are below 6.1e-5", " 0 of them became 0"]);
    let [told, _] = of("lost", 1e-9).try_into().unwrap();
    assert_names(&told, &["62 of 64 scales", "62 of them became 0"]);
}
