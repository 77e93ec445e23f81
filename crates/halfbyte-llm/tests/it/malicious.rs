//! Files that lie to a language model: each an error that says where and what.

use halfbyte_llm::{Config, KvType, Result, Tokenizer};
use std::path::{Path, PathBuf};
use std::time::Instant;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/malicious")
}

/// Reads and uses what is in a folder, up to the first error.
fn read_whole(folder: &Path) -> Result<()> {
    if folder.join("tokenizer.json").exists() {
        let tokenizer = Tokenizer::from_folder(folder)?;
        tokenizer.encode("a b")?;
        tokenizer.decode(&[2, 0, 1])?;
        return Ok(());
    }
    let config = Config::from_folder(folder)?;
    assert!(config.spec.kv_bytes_per_token(KvType::F32) > 0);
    Ok(())
}

/// Each folder of `testdata/malicious`, and what its error names.
const CASES: &[(&str, &[&str])] = &[
    ("config-bos-negative", &["config.json", "bos_token_id", "got -1"]),
    ("config-deep-json", &["config.json", "recursion limit"]),
    ("config-duplicate-names", &["config.json", "`vocab_size` appears twice"]),
    ("config-duplicate-nested-names", &["config.json", "`factor` appears twice"]),
    ("config-eos-beyond-vocabulary", &["config.json", "eos_token_id", "got 320"]),
    ("config-heads-absurd", &["config.json", "num_attention_heads", "4611686018427387904"]),
    ("config-layers-absurd", &["config.json", "num_hidden_layers", "at most 4096"]),
    ("config-negative-size", &["config.json", "hidden_size", "got -128"]),
    ("config-no-kv-heads", &["config.json", "num_key_value_heads", "got 0"]),
    ("config-no-layers", &["config.json", "num_hidden_layers", "got 0"]),
    ("config-not-utf8", &["config.json", "expected UTF-8"]),
    ("config-vocab-absurd", &["config.json", "vocab_size", "268435456"]),
    ("generation-config-deep-json", &["generation_config.json", "recursion limit"]),
    ("generation-config-duplicate-names", &["generation_config.json", "`eos_token_id` appears twice"]),
    ("tokenizer-characters-cut", &["tokenizer.json", "at most 0 bytes"]),
    ("tokenizer-characters-empty", &["contradicts itself", "index out of bounds"]),
    ("tokenizer-characters-index", &["contradicts itself", "index out of bounds"]),
    ("tokenizer-characters-length", &["tokenizer.json", "at most 8 bytes, got a length of 4294967280"]),
    ("tokenizer-characters-short", &["tokenizer.json", "at least 4 bytes"]),
    ("tokenizer-deep-json", &["tokenizer.json", "recursion limit"]),
    ("tokenizer-duplicate-names", &["tokenizer.json", "`model` appears twice"]),
    ("tokenizer-duplicate-tokens", &["tokenizer.json", "`ab` appears twice"]),
    ("tokenizer-empty", &["tokenizer.json", "expected JSON"]),
    ("tokenizer-growing-text", &["tokenizer.json", "`normalizer`", "4096 times longer"]),
    ("tokenizer-growing-text-decoded", &["tokenizer.json", "`decoder`", "4096 times longer"]),
    ("tokenizer-id-beyond-u32", &["tokenizer.json", "4294967296"]),
    ("tokenizer-merge-beyond-vocabulary", &["tokenizer.json", "contradicts itself"]),
    ("tokenizer-merge-cuts-character", &["tokenizer.json", "`model.merges`", "begin with \"#\""]),
    ("tokenizer-merge-shorter-than-prefix", &["tokenizer.json", "`model.merges`", "begin with \"##\""]),
    ("tokenizer-merge-unknown", &["tokenizer.json", "`c` out of vocabulary"]),
    ("tokenizer-negative-id", &["tokenizer.json", "`-2`"]),
    ("tokenizer-nested-sequences", &["tokenizer.json", "at most 24 levels"]),
    ("tokenizer-not-utf8", &["tokenizer.json", "expected JSON"]),
    ("tokenizer-regex-open", &["tokenizer.json", "parenthesis"]),
    ("tokenizer-repeated-repetitions", &["tokenizer.json", "`pre_tokenizer`", "repetitions of at most 4096"]),
    ("tokenizer-stripped-to-less-than-nothing", &["contradicts itself"]),
    ("tokenizer-unknown-beyond-vocabulary", &["tokenizer.json", "UnkIdNotInVocabulary"]),
];

#[test]
fn every_malicious_folder_is_an_error_that_says_where_and_what() {
    let entries = std::fs::read_dir(root()).unwrap();
    let mut found: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    assert_eq!(found, CASES.iter().map(|(case, _)| *case).collect::<Vec<_>>());
    for (case, parts) in CASES {
        let begun = Instant::now();
        let text = read_whole(&root().join(case)).unwrap_err().to_string();
        for part in *parts {
            assert!(text.contains(part), "{case}: expected `{part}` in: {text}");
        }
        assert!(text.len() < 1000 && begun.elapsed().as_secs() < 5, "{case}: {} bytes", text.len());
    }
}

#[test]
fn tokenizers_within_the_limits_are_read() {
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("tokenizer.json");
    let text = std::fs::read_to_string(root().join("tokenizer-nested-sequences/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let replace = |pattern: &str, content: &str| serde_json::json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
    // Many that keep the length, and a few that do not.
    let mut rules: Vec<_> = (0..40).map(|_| replace("x", "y")).collect();
    rules.extend((0..8).map(|_| replace("y", "yy")));
    json["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": rules});
    json["pre_tokenizer"] = serde_json::json!(
        {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|a{0,40}?|[^\\s]{2,}"}, "behavior": "Isolated", "invert": false}
    );
    json["model"]["unk_token"] = "a".into();
    std::fs::write(&path, json.to_string()).unwrap();
    assert_eq!(Tokenizer::from_file(&path).unwrap().encode("x").unwrap().len(), 256);
}
