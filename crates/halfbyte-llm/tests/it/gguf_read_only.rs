//! Architectures that are read from GGUF and not written: files as llama.cpp's converter makes them, in one part and in several,
//! compute what the folders compute.

pub mod files;
mod rope;
pub mod tables;

use files::*;
use halfbyte_checkpoint::gguf::Value;
use halfbyte_checkpoint::{Checkpoint, Weights};
use halfbyte_llm::check::contradictions;
use halfbyte_llm::{Config, LoadOptions, Model};
use std::path::Path;

#[test]
fn models_as_llama_cpp_writes_them_compute_what_the_folders_compute() {
    let number = Value::U32;
    let gemma = [
        ("feed_forward_length", number(256)),
        ("attention.key_length", number(32)),
        ("attention.value_length", number(32)),
        ("attention.sliding_window", number(16)),
    ];
    let with = |base: &[(&'static str, Value)], more: &[(&'static str, Value)]| [base, more].concat();
    let experts = [("feed_forward_length", number(256)), ("expert_used_count", number(2))];
    let gpt_oss = [
        ("expert_count", number(4)),
        ("expert_feed_forward_length", number(256)),
        ("attention.key_length", number(32)),
        ("attention.value_length", number(32)),
        ("attention.sliding_window", number(16)),
        ("rope.freq_base", Value::F32(150_000.0)),
        ("rope.scaling.type", Value::String("yarn".into())),
        ("rope.scaling.factor", Value::F32(4.0)),
        ("rope.scaling.original_context_length", number(64)),
        ("rope.scaling.yarn_beta_fast", Value::F32(32.0)),
        ("rope.scaling.yarn_beta_slow", Value::F32(1.0)),
    ];
    let gpt_neox = [
        ("feed_forward_length", number(160)),
        ("rope.dimension_count", number(4)),
        ("use_parallel_residual", Value::Bool(true)),
    ];
    let cases: [Case; 8] = [
        (
            "mixtral",
            "llama",
            LLAMA,
            with(&experts, &[("expert_count", number(4)), ("rope.freq_base", Value::F32(1e6))]),
        ),
        (
            "qwen3-moe",
            "qwen3moe",
            LLAMA,
            with(
                &experts,
                &[
                    ("expert_count", number(8)),
                    ("expert_feed_forward_length", number(128)),
                    ("attention.key_length", number(32)),
                ],
            ),
        ),
        ("gemma2", "gemma2", GEMMA, with(&gemma, &[("attn_logit_softcapping", Value::F32(50.0))])),
        (
            "gemma3",
            "gemma3",
            GEMMA,
            with(&gemma, &[("rope.freq_base", Value::F32(1e6)), ("attention.sliding_window_pattern", number(2))]),
        ),
        ("phi3", "phi3", PHI3, vec![("feed_forward_length", number(256)), ("rope.dimension_count", number(24))]),
        ("bloom", "bloom", BLOOM, vec![("feed_forward_length", number(512))]),
        ("gpt-neox", "gptneox", GPT_NEOX, gpt_neox.to_vec()),
        ("gpt-oss", "gpt-oss", GPT_OSS, with(&experts, &gpt_oss)),
    ];
    for (name, gguf, modules, more) in cases {
        let (dir, mut tensors) = (tempfile::tempdir().unwrap(), tensors(name, modules));
        if gguf == "llama" {
            paired(&mut tensors, 32);
        }
        let (metadata, path) = (metadata(name, gguf, &more), dir.path().join("model.gguf"));
        write(&path, &metadata, &tensors.iter().collect::<Vec<_>>());
        let weights = Weights::open(&path).unwrap();
        let config = Config::from_weights(&weights).unwrap();
        let findings = contradictions(&config, &weights).into_findings();
        assert!(findings.is_empty(), "{name}: {findings:?}");
        if gguf.starts_with("gpt") {
            assert_eq!(config.spec, Config::from_folder(&crate::architecture(name)).unwrap().spec, "{name}");
        }
        let want = expected(name);
        assert_near(name, &logits(&path), &want);

        // The same in three parts, of which the first has all the metadata.
        let parts = dir.path().join("parts");
        std::fs::create_dir(&parts).unwrap();
        let part = |number: u16| parts.join(format!("some-model-{:05}-of-00003.gguf", number + 1));
        for number in 0..3u16 {
            let mut of_part = if number == 0 { metadata.clone() } else { Vec::new() };
            of_part.push(("split.no".to_owned(), Value::U16(number)));
            of_part.push(("split.count".to_owned(), Value::U16(3)));
            of_part.push(("split.tensors.count".to_owned(), Value::I32(tensors.len() as i32)));
            let here = tensors.iter().skip(usize::from(number)).step_by(3).collect::<Vec<_>>();
            write(&part(number), &of_part, &here);
        }
        assert_near(name, &logits(&part(0)), &want);
        // A folder is opened by its first part.
        assert_near(name, &logits(&parts), &want);
        let refused = |path: &Path, words: &[&str]| {
            let error = Checkpoint::open(path).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        refused(&part(1), &["split.no", "first part"]);
        std::fs::rename(part(2), parts.join("kept")).unwrap();
        refused(&part(0), &["00003-of-00003", "part 3 of 3"]);
        std::fs::copy(part(1), part(2)).unwrap();
        refused(&part(0), &["00003-of-00003", "split.no", "2"]);
        std::fs::remove_file(part(2)).unwrap();
        let mut of_part = vec![("split.no".to_owned(), Value::U16(2)), ("split.count".to_owned(), Value::U16(3))];
        write(&part(2), &of_part, &tensors.iter().take(1).collect::<Vec<_>>());
        refused(&part(0), &["split.tensors.count"]);
        std::fs::remove_file(part(2)).unwrap();
        of_part[1].1 = Value::U16(4);
        write(&part(2), &of_part, &tensors.iter().take(1).collect::<Vec<_>>());
        refused(&part(0), &["split.count", "3"]);
    }
}

/// Mixtral as files had it before April 2024: a tensor for each expert.
#[test]
fn experts_with_a_tensor_each_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut apart: Vec<Tensor> = Vec::new();
    let mut tensors = tensors("mixtral", LLAMA);
    paired(&mut tensors, 32);
    for tensor in tensors {
        match tensor.name.split_once("_exps.") {
            None => apart.push(tensor),
            Some((stack, kind)) => {
                let [experts, n, k] = tensor.shape[..] else { panic!("{}", tensor.name) };
                apart.extend(tensor.values.chunks_exact(n * k).enumerate().map(|(expert, values)| Tensor {
                    name: format!("{stack}.{expert}.{kind}"),
                    shape: vec![n, k],
                    values: values.to_vec(),
                }));
                assert_eq!(experts, 4);
            }
        }
    }
    let number = Value::U32;
    let more = [
        ("feed_forward_length", number(256)),
        ("expert_used_count", number(2)),
        ("expert_count", number(4)),
        ("rope.freq_base", Value::F32(1e6)),
    ];
    let path = dir.path().join("model.gguf");
    write(&path, &metadata("mixtral", "llama", &more), &apart.iter().collect::<Vec<_>>());
    assert_near("mixtral", &logits(&path), &expected("mixtral"));
    // One that is missing is told.
    let kept: Vec<&Tensor> = apart.iter().filter(|tensor| tensor.name != "blk.1.ffn_up.2.weight").collect();
    write(&path, &metadata("mixtral", "llama", &more), &kept);
    let error = Model::load(&path, &LoadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("model.layers.1.block_sparse_moe.experts.2.w3"), "{error}");
}
