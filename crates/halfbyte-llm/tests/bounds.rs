//! Tokenizers that would take memory or time without end: each is refused, or used, within 64 MiB beyond its file.
//!
//! The limit is set on this process: one that is passed ends it, with the name of the case printed before.

use cap::Cap;
use halfbyte_llm::{Error, Result, Tokenizer};
use serde_json::{Value, json};
use std::alloc::System;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Tests run one after the other: all of them share the allocator.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn within<T>(case: &str, bytes: usize, work: impl FnOnce() -> T) -> T {
    eprint!("{case}: ");
    let begun = Instant::now();
    ALLOCATOR.set_limit(ALLOCATOR.allocated() + bytes + (64 << 20)).unwrap();
    let result = work();
    ALLOCATOR.set_limit(usize::MAX).unwrap();
    eprintln!("{:.2} s", begun.elapsed().as_secs_f64());
    assert!(begun.elapsed().as_secs() < 30, "{case}: {:?}", begun.elapsed());
    result
}

/// A small tokenizer with some parts exchanged.
fn tokenizer(changed: &[(&str, Value)]) -> String {
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "unk_token": "a", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    });
    changed.iter().for_each(|(part, value)| file[*part] = value.clone());
    file.to_string()
}

fn list(kind: &str, steps: &str, step: Value, times: usize) -> Value {
    json!({"type": kind, steps: vec![step; times]})
}

fn replace(pattern: &str, by: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": pattern}, "content": by})
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = |three: &[u8]| {
        let bits = three.iter().fold(0u32, |bits, &b| bits << 8 | u32::from(b));
        [18, 12, 6, 0].map(|shift| char::from(DIGITS[(bits >> shift) as usize & 63]))
    };
    assert!(bytes.len().is_multiple_of(3));
    bytes.chunks(3).flat_map(digits).collect()
}

fn use_it(path: &Path) -> Result<usize> {
    let tokenizer = Tokenizer::from_file(path)?;
    let mut count = 0;
    for text in ["", "a", "ab ba 中", &"a b".repeat(500)] {
        let ids = tokenizer.encode(text)?;
        tokenizer.decode(&ids)?;
        count += ids.len();
    }
    Ok(count)
}

/// Every case with what its error names.
fn refused() -> Vec<(&'static str, String, &'static str)> {
    let normalizer =
        |steps: Vec<Value>| tokenizer(&[("normalizer", json!({"type": "Sequence", "normalizers": steps}))]);
    let decoder = |step: Value, times| tokenizer(&[("decoder", list("Sequence", "decoders", step, times))]);
    let model = |model: Value| tokenizer(&[("model", model)]);
    let prepend = |text: &str| json!({"type": "Prepend", "prepend": text});
    let unigram = |vocab: Vec<(String, f64)>| model(json!({"type": "Unigram", "unk_id": 0, "vocab": vocab}));
    let bpe = |vocab: Value, merges: Value| model(json!({"type": "BPE", "vocab": vocab, "merges": merges}));
    let added = |count: usize, length: usize| {
        let one = |id: usize| {
            json!({"id": id, "content": format!("{id:>length$}"), "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": true, "special": false})
        };
        (3..3 + count).map(one).collect::<Vec<_>>()
    };
    let template = json!({"type": "TemplateProcessing", "special_tokens": {},
        "single": vec![json!({"Sequence": {"id": "A", "type_id": 0}}); 2], "pair": []});
    let mut repeated = template.clone();
    repeated["single"] = vec![template["single"][0].clone(); 4000].into();
    let many: serde_json::Map<String, Value> = (0..600_000).map(|id| (format!("t{id}"), id.into())).collect();
    let mut characters = [&4u32.to_le_bytes()[..], &[0; 4], "b".repeat(99_999).as_bytes()].concat();
    characters.resize(characters.len().next_multiple_of(3), 0);
    let characters = json!({"type": "Precompiled", "precompiled_charsmap": base64(&characters)});
    let splits = list(
        "Sequence",
        "pretokenizers",
        json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}),
        30,
    );
    let words = |longest: u64| {
        model(json!({"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a",
        "continuing_subword_prefix": "", "max_input_chars_per_word": longest}))
    };
    let distinct = |id: usize| (format!("{:04}{}", id, "x".repeat(4000)), -1.0);
    vec![
        (
            "a long prefix, replaced",
            normalizer(vec![prepend(&"a".repeat(100_000)), replace("a", &"b".repeat(4000))]),
            "4096 times longer",
        ),
        ("many prefixes", normalizer(vec![prepend("a"); 200_000]), "at most 16384 values"),
        ("doubled thirteen times", normalizer(vec![prepend("a"); 13]), "4096 times longer"),
        ("many steps", normalizer(vec![json!({"type": "Lowercase"}); 600]), "at most 512 steps"),
        ("bytes of bytes", normalizer(vec![json!({"type": "ByteLevel"}); 40]), "4096 times longer"),
        ("spaces around spaces", normalizer(vec![json!({"type": "BertNormalizer"}); 40]), "4096 times longer"),
        ("nothing replaced", normalizer(vec![replace("", "x")]), "`pattern`: expected a text to look for"),
        (
            "nothing matched",
            normalizer(vec![json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "x"})]),
            "`pattern`",
        ),
        ("a table with one long text", tokenizer(&[("normalizer", characters)]), "4096 times longer"),
        (
            "a long expression",
            tokenizer(&[(
                "pre_tokenizer",
                json!({"type": "Split", "pattern": {"Regex": "\\p{L}".repeat(100_000)},
            "behavior": "Isolated", "invert": false}),
            )]),
            "`Regex`: expected at most 16384 bytes",
        ),
        (
            "a long list",
            normalizer(vec![json!({"type": "Replace", "pattern": {"String": "x".repeat(20_000)}, "content": ""})]),
            "`String`: expected at most 16384 bytes",
        ),
        ("spaces before spaces", tokenizer(&[("pre_tokenizer", splits)]), "4096 times longer"),
        ("an empty suffix", decoder(json!({"type": "BPEDecoder", "suffix": ""}), 40), "`suffix`"),
        (
            "an empty pad",
            decoder(json!({"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": false}), 40),
            "`pad_token`",
        ),
        ("texts repeated", tokenizer(&[("post_processor", repeated)]), "at most 16 times"),
        (
            "repetitions repeated",
            tokenizer(&[("post_processor", list("Sequence", "processors", template, 30))]),
            "at most 16 times",
        ),
        (
            "a million merges",
            bpe(json!({"a": 0, "b": 1, "ab": 2}), json!(vec!["a b"; 1_000_000])),
            "`model.merges`: expected at most 8",
        ),
        (
            "a million merges in pairs",
            bpe(json!({"a": 0, "b": 1, "ab": 2}), json!(vec![["a", "b"]; 1_000_000])),
            "`model.merges`",
        ),
        ("many tokens", bpe(many.into(), json!([])), "at most 524288 names"),
        ("a long token", bpe(json!({"x".repeat(1 << 20): 0}), json!([])), "at most 4096 bytes, got one of 1048576"),
        ("a deep tree", unigram(vec![("x".repeat(1 << 20), -1.0)]), "at most 4096 bytes"),
        ("a wide tree", unigram((0..600).map(distinct).collect()), "distinct beginnings"),
        ("many added tokens", tokenizer(&[("added_tokens", added(200_000, 1).into())]), "`added_tokens`"),
        (
            "added tokens that grow",
            tokenizer(&[("added_tokens", added(2000, 4).into()), ("normalizer", replace("1", &"b".repeat(4000)))]),
            "`added_tokens`: expected at most 524 bytes",
        ),
        ("long words", words(1_000_000), "`model.max_input_chars_per_word`: expected at most 512"),
        (
            "many fields",
            format!("{{{}\"z\":0}}", (0..100_000).map(|i| format!("\"{i}\":0,")).collect::<String>()),
            "at most 64 names",
        ),
    ]
}

#[test]
fn tokenizers_without_bounds_are_refused_within_bounds() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("tokenizer.json");
    for (case, file, expected) in refused() {
        std::fs::write(&path, &file).unwrap();
        let error = within(case, 2 * file.len(), || use_it(&path)).unwrap_err().to_string();
        assert!(error.contains(expected), "{case}: {error}");
        assert!(error.len() < 1000, "{case}: {} bytes", error.len());
    }
}

#[test]
fn texts_that_may_become_too_long_are_refused_and_short_ones_are_not() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer(&[("normalizer", replace("a", &"b".repeat(4000)))])).unwrap();
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    let short = within("a short text", 0, || tokenizer.encode(&"a".repeat(100))).unwrap();
    assert_eq!(short.len(), 400_000);
    let error = within("a long text", 0, || tokenizer.encode(&"a".repeat(1 << 20))).unwrap_err().to_string();
    assert!(
        error.contains("at most 524 bytes of text, which its replacements make up to 4000 times longer"),
        "{error}"
    );
}

#[test]
fn expressions_that_go_back_and_forth_end() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("tokenizer.json");
    for regex in [
        "(?:a|a)*(?=b)|a",
        "(?:(?:a|aa)+)+(?=b)|(?:a|aa)",
        "(a*)*\\1b|a",
        "(?=(?:a|a){19}b)c|(?:a(?!b))",
        "(?:(?:a|a)?(?:a|a)?(?:a|a)?(?:a|a)?(?:a|a)?(?:a|a)?(?=b))|(?=a)a",
    ] {
        let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
        std::fs::write(&path, tokenizer(&[("pre_tokenizer", split)])).unwrap();
        let tokenizer = Tokenizer::from_file(&path).unwrap();
        within(regex, 0, || tokenizer.encode(&"a".repeat(1000))).unwrap();
    }
}

#[test]
fn long_prompts_are_refused_early_and_taken_piece_by_piece() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m");
    let tokenizer = Tokenizer::from_folder(&model).unwrap();
    let words = "def read_lines(self, path): return path.words or self ".repeat(4 << 20 >> 6);
    let blank_line = " ".repeat(12 << 20);
    for text in [&words, &"x".repeat(12 << 20)] {
        let error =
            within("megabytes for 1024 tokens", 0, || tokenizer.encode_prompt_within(text, Some(0), 1024)).unwrap_err();
        assert!(matches!(error, Error::TextTooLong { limit: 1024, least: 1025.., .. }), "{error}");
    }
    let all = within("4 MB in pieces", 0, || tokenizer.encode(&words)).unwrap();
    assert!(all.len() > 1 << 19);
    // What the length alone cannot tell is told by the tokens of a beginning.
    let error = within("4 MB, stopped", 0, || tokenizer.encode_prompt_within(&words, None, 1 << 19)).unwrap_err();
    assert!(matches!(error, Error::TextTooLong { least, .. } if (1 << 19..all.len()).contains(&least)), "{error}");
    assert!(tokenizer.encode_prompt_within("x = 1", Some(0), 1024).is_ok());
    assert!(matches!(tokenizer.encode_prompt_within(&blank_line[..4096], None, 1024), Ok(ids) if ids.len() <= 4096));
}

#[test]
fn a_tokenizer_as_large_as_the_largest_in_the_field_loads() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let letters: Vec<char> = ('A'..='Z').chain('a'..='z').chain('0'..='9').chain(['_']).collect();
    let (mut vocab, mut merges) = (serde_json::Map::new(), Vec::new());
    let mut add = |token: String| {
        let id = vocab.len();
        vocab.insert(token, id.into());
    };
    letters.iter().for_each(|a| add(a.to_string()));
    for a in &letters {
        for b in &letters {
            add(format!("{a}{b}"));
            merges.push([a.to_string(), b.to_string()]);
            for c in &letters {
                add(format!("{a}{b}{c}"));
                merges.push([format!("{a}{b}"), c.to_string()]);
                merges.push([a.to_string(), format!("{b}{c}")]);
            }
        }
    }
    assert!(vocab.len() > 250_000 && merges.len() > 500_000);
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("tokenizer.json");
    let model = json!({"type": "BPE", "vocab": vocab, "merges": merges});
    std::fs::write(&path, tokenizer(&[("model", model)])).unwrap();
    assert_eq!(Tokenizer::from_file(&path).unwrap().encode("abcabc").unwrap().len(), 2);
}
