//! Every architecture through the whole program: checked against its files, quantised while it is loaded and into files, and under the
//! names of a model that was saved without its head.

use halfbyte::Format;
use halfbyte::cpu::Cpu;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_checkpoint::{Checkpoint, Job, LinearWeight, Quantization, Target, Weights, write_model};
use halfbyte_llm::check::contradictions;
use halfbyte_llm::{Config, LoadOptions, Model, Session};
use std::path::{Path, PathBuf};

fn all() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/architectures")
}

fn names() -> Vec<String> {
    let entries = std::fs::read_dir(all()).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= 14, "{names:?}");
    names
}

fn logits(path: &Path, options: &LoadOptions) -> Vec<f32> {
    let (cpu, model) = (Cpu::new(1).unwrap(), Model::load(path, options).unwrap());
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 320).collect();
    Session::new(&model, &cpu, 40).unwrap().prefill(&tokens).unwrap().to_vec()
}

#[test]
fn files_hold_what_configurations_say_and_nothing_else() {
    for name in names() {
        let weights = Weights::open(all().join(&name)).unwrap();
        let config = Config::from_weights(&weights).unwrap();
        let findings = contradictions(&config, &weights).into_findings();
        assert!(findings.is_empty(), "{name}: {findings:?}");
        // And are told where they do not.
        let mut other = config.clone();
        other.spec.rename(&|tensor| format!("{tensor}.of_another"));
        let missing = contradictions(&other, &weights).missing;
        assert!(!missing.is_empty(), "{name}");
    }
}

#[test]
fn biases_that_the_configuration_denies_are_told() {
    let folder = all().join("qwen2");
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let llama = text.replace("Qwen2ForCausalLM", "LlamaForCausalLM");
    let config = Config::parse(&llama, &folder.join("config.json")).unwrap();
    let findings = contradictions(&config, &Weights::open(&folder).unwrap());
    assert!(findings.missing.is_empty() && findings.uncounted.is_none(), "{findings:?}");
    let mut subjects: Vec<_> = findings.unused.iter().map(|finding| finding.subject.as_str()).collect();
    subjects.sort_unstable();
    assert_eq!(subjects, ["k", "q", "v"].map(|part| format!("model.layers.*.self_attn.{part}_proj.bias")));
    assert!(findings.unused.iter().all(|finding| finding.text.contains("no bias")), "{findings:?}");
}

#[test]
fn files_that_were_quantised_give_the_bits_of_models_quantised_in_memory() {
    let format: Format = "w8a16-g32".parse().unwrap();
    let in_memory = LoadOptions { quantize: Some((format.weight, Rtn::default())), ..LoadOptions::default() };
    for name in names() {
        let dir = tempfile::tempdir().unwrap();
        let source = Weights::open(all().join(&name)).unwrap();
        let want = logits(&all().join(&name), &in_memory);
        let dense = logits(&all().join(&name), &LoadOptions::default());
        assert_ne!(want, dense, "{name}");
        let most = dense.iter().fold(0.0f32, |most, l| most.max(l.abs()));
        let error = want.iter().zip(&dense).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Another expert may be chosen: those models may be farther off.
        assert!(error <= 0.5 * most, "{name}: {error} of {most}");
        for (target, folder) in [(Target::Native, "native"), (Target::Gptq(None), "gptq")] {
            let quantized = dir.path().join(folder);
            let quantization = Quantization {
                target,
                format: &mut |layer| (layer.in_block() && !layer.is_router()).then_some(format.weight),
                quantize: &mut |_, weight, format| match weight {
                    LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, Rtn::default()),
                    LinearWeight::Quantized(q) => Ok(q.clone()),
                },
                dense: &mut |_| None,
                untied: None,
            };
            write_model(Job::new(&source, &quantized), quantization).unwrap();
            assert_eq!(logits(&quantized, &LoadOptions::default()), want, "{name}, {folder}");
            let weights = Weights::open(&quantized).unwrap();
            let config = Config::from_weights(&weights).unwrap();
            let findings = contradictions(&config, &weights).into_findings();
            assert!(findings.is_empty(), "{name}, {folder}: {findings:?}");
        }
    }
}

/// BLOOM's published files are such.
#[test]
fn files_of_a_model_without_its_head_are_read() {
    for name in ["bloom", "llama-tied-mha", "gemma3"] {
        let dir = tempfile::tempdir().unwrap();
        let from = Checkpoint::open(all().join(name)).unwrap();
        let short = |tensor: &str| tensor.split_once('.').unwrap().1.to_owned();
        let specs = from.tensors().map(|info| TensorSpec {
            name: short(info.name),
            dtype: info.dtype,
            shape: info.shape.to_vec(),
        });
        let mut writer = create(dir.path(), &specs.collect::<Vec<_>>(), u64::MAX).unwrap();
        for tensor in from.tensor_names() {
            writer.write(&short(tensor), &from.data(tensor).unwrap()).unwrap();
        }
        writer.finish().unwrap();
        std::fs::copy(all().join(name).join("config.json"), dir.path().join("config.json")).unwrap();
        let weights = Weights::open(dir.path()).unwrap();
        let findings = contradictions(&Config::from_weights(&weights).unwrap(), &weights).into_findings();
        assert!(findings.is_empty(), "{name}: {findings:?}");
        let [got, want] = [dir.path(), &all().join(name)].map(|path| logits(path, &LoadOptions::default()));
        assert_eq!(got, want, "{name}");
    }
}
