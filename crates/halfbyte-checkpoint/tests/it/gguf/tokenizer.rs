//! Tokenizers: what GGUF's lists say encodes texts to the same ids.

use super::tiny;
use crate::support::{assert_names, model, model_config, read_json, testdata, text_of};
use halfbyte_checkpoint::Error;
use halfbyte_checkpoint::gguf::{Array, GgmlType, Header, Value as Meta, config_json, metadata_from, tokenizer_json};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

fn loaded(json: &Value) -> Tokenizer {
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    tokenizer.encode(text, special).unwrap().get_ids().to_vec()
}

fn header_of(metadata: Vec<(String, Meta)>) -> Header {
    Header { file: "m.gguf".into(), version: 3, metadata, tensors: Vec::new(), alignment: 32 }
}

fn set(header: &mut Header, key: &str, value: Option<Meta>) {
    let key = format!("tokenizer.ggml.{key}");
    header.metadata.retain(|(name, _)| *name != key);
    header.metadata.extend(value.map(|value| (key, value)));
}

/// Metadata of the model that ships with the project, and its tokenizer.
fn shipped() -> (Header, Value) {
    let json = read_json(&model().join("tokenizer.json"));
    (header_of(metadata_from(&model_config(), &json, GgmlType::F16, None).unwrap()), json)
}

#[test]
fn the_shipped_tokenizer_comes_back() {
    let (header, json) = shipped();
    assert_eq!(header.get("tokenizer.ggml.pre"), Some(&Meta::String("gpt-2".into())));
    let back = tokenizer_json(&header).unwrap();
    for part in ["added_tokens", "normalizer", "pre_tokenizer", "decoder"] {
        assert_eq!(back[part], json[part], "{part}");
    }
    // A list says that nothing begins a text; the JSON does not say.
    assert_eq!(back["post_processor"]["single"], json!([{"Sequence": {"id": "A", "type_id": 0}}]));
    assert!(json["post_processor"].is_null());
    let (before, after) = (loaded(&json), loaded(&back));
    let texts = std::fs::read_to_string(model().join("validation.jsonl")).unwrap();
    let (mut tokens, mut lines) = (0, 0);
    for line in texts.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let text = line["text"].as_str().unwrap();
        let want = ids(&before, text, true);
        assert_eq!(ids(&after, text, true), want);
        assert_eq!(after.decode(&want, false).unwrap(), before.decode(&want, false).unwrap());
        tokens += want.len();
        lines += 1;
    }
    assert!(lines > 10 && tokens > 50_000, "{lines} texts of {tokens} tokens");
    let end = "<|endoftext|>a<|endoftext|>";
    assert_eq!(ids(&after, end, true), ids(&before, end, true));
}

#[test]
fn scores_merge_as_sentencepiece_does() {
    let (_, header) = tiny();
    let tokenizer = loaded(&tokenizer_json(&header).unwrap());
    let cases = read_json(&testdata("gguf/tiny_llama_tokens.json"));
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let want: Vec<u32> = case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(ids(&tokenizer, text, false), want, "{text:?}");
        assert_eq!(ids(&tokenizer, text, true), [&[1], want.as_slice()].concat(), "{text:?} after its bos");
        if !text.contains(['▁', '|']) {
            assert_eq!(tokenizer.decode(&want, true).unwrap(), text);
        }
    }
}

/// A tokenizer.json with ranks becomes scores, and these the same ranks.
#[test]
fn a_tokenizer_with_scores_comes_back() {
    let (bytes, header) = tiny();
    let config = config_json(&header, &bytes).unwrap();
    let json = tokenizer_json(&header).unwrap();
    let metadata = header_of(metadata_from(&config, &json, GgmlType::Q8_0, None).unwrap());
    assert_eq!(tokenizer_json(&metadata).unwrap(), json);
    for key in ["tokens", "token_type", "unknown_token_id", "add_space_prefix", "eot_token_id", "add_bos_token"] {
        let key = format!("tokenizer.ggml.{key}");
        assert_eq!(metadata.get(&key), header.get(&key), "{key}");
    }
    // Without a word of it the first token is the unknown one, as for llama.cpp.
    let mut silent = header.clone();
    set(&mut silent, "unknown_token_id", None);
    assert_eq!(tokenizer_json(&silent).unwrap()["model"]["unk_token"], json["model"]["unk_token"]);
    assert_eq!(json["model"]["vocab"][json["model"]["unk_token"].as_str().unwrap()], 0);
    let mut plain = header;
    set(&mut plain, "add_space_prefix", Some(Meta::Bool(false)));
    set(&mut plain, "add_bos_token", Some(Meta::Bool(false)));
    set(&mut plain, "add_eos_token", Some(Meta::Bool(true)));
    let json = tokenizer_json(&plain).unwrap();
    let metadata = header_of(metadata_from(&config, &json, GgmlType::Q8_0, None).unwrap());
    assert_eq!(tokenizer_json(&metadata).unwrap(), json);
    let encoded = ids(&loaded(&json), "the", true);
    assert_eq!(encoded.last(), Some(&2));
    assert_eq!(loaded(&json).decode(&encoded, true).unwrap(), "the");
}

/// What lists cannot say is in the file whole, and believed if the lists have the same tokens.
#[test]
fn a_tokenizer_that_composes_characters_comes_back() {
    let (_, mut json) = shipped();
    json["normalizer"] = json!({"type": "NFC"});
    let metadata = metadata_from(&model_config(), &json, GgmlType::F16, None).unwrap();
    let whole = "tokenizer.huggingface.json";
    let header = header_of(metadata);
    assert_eq!(tokenizer_json(&header).unwrap(), json);
    let (composed, decomposed) = ("caf\u{e9}", "cafe\u{301}");
    let tokenizer = loaded(&tokenizer_json(&header).unwrap());
    assert_eq!(ids(&tokenizer, composed, false), ids(&tokenizer, decomposed, false));
    let other = |value: &str| {
        let mut header = header_of(metadata_from(&model_config(), &json, GgmlType::F16, None).unwrap());
        let entry = header.metadata.iter_mut().find(|(key, _)| key == whole).unwrap();
        entry.1 = Meta::String(value.to_owned());
        text_of(tokenizer_json(&header))
    };
    assert_names(&other("{"), &[whole, "expected JSON"]);
    let mut swapped = json.clone();
    swapped["model"]["vocab"]["!"] = json["model"]["vocab"]["#"].clone();
    swapped["model"]["vocab"]["#"] = json["model"]["vocab"]["!"].clone();
    assert_names(&other(&swapped.to_string()), &[whole, "as in the list"]);
}

/// Tokens and merges of the field's largest, which are more values than a config has.
#[test]
fn a_large_tokenizer_that_composes_characters_comes_back() {
    let (_, mut json) = shipped();
    json["normalizer"] = json!({"type": "NFC"});
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    let (first, most) = (vocab.len() + 100, 160_000);
    let mut merges = Vec::new();
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    // Of three letters, then of these and one more.
    let mut parts: Vec<String> = letters.iter().flat_map(|a| letters.iter().map(move |b| format!("{a}{b}"))).collect();
    while merges.len() < most {
        let of = |part: &String| letters.iter().map(|letter| [part.clone(), letter.clone()]).collect::<Vec<_>>();
        let pairs: Vec<[String; 2]> = parts.iter().flat_map(of).take(most - merges.len()).collect();
        parts = pairs.iter().map(|pair| pair.concat()).collect();
        merges.extend(pairs);
    }
    for (id, merge) in merges.iter().enumerate() {
        vocab.entry(merge.concat()).or_insert(json!(first + id));
    }
    let listed = json["model"]["merges"].as_array_mut().unwrap();
    listed.extend(merges.into_iter().map(|pair| json!(pair)));
    let mut config = model_config();
    config.insert("vocab_size".into(), json!(first + most));
    let header = header_of(metadata_from(&config, &json, GgmlType::F16, None).unwrap());
    assert_eq!(tokenizer_json(&header).unwrap(), json);
}

/// How a text is cut before merging, for every name that is known.
#[test]
fn known_pre_tokenizers_cut_as_their_models_do() {
    let cut = |header: &Header, text: &str| -> Vec<String> {
        let mut tokenizer = tokenizer_json(header).unwrap();
        // Every piece shows as it is: without merges, each byte is a token.
        tokenizer["model"]["merges"] = json!([]);
        use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
        let mut text = PreTokenizedString::from(text);
        loaded(&tokenizer).get_pre_tokenizer().unwrap().pre_tokenize(&mut text).unwrap();
        let pieces = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
        pieces.into_iter().map(|(piece, _, _)| piece.replace('Ġ', "_").replace('Ċ', "/")).collect()
    };
    let text = "It'S 12345 a  b\n\n c=+(x),Ab";
    let cases: [(&[&str], &[&str]); 12] = [
        (
            &["gpt-2", "mpt", "olmo", "mellum"],
            &["It", "'", "S", "_12345", "_a", "_", "_b", "//", "_c", "=+(", "x", "),", "Ab"],
        ),
        (
            &["llama-bpe", "llama3", "llama-v3", "falcon3"],
            &["It", "'S", "_", "123", "45", "_a", "_", "_b", "//", "_c", "=+(", "x", "),", "Ab"],
        ),
        (
            &["smollm", "starcoder", "command-r"],
            &["It", "'", "S", "_", "1", "2", "3", "4", "5", "_a", "_", "_b", "//", "_c", "=+(", "x", "),", "Ab"],
        ),
        (
            &["qwen2", "deepseek-r1-qwen"],
            &["It", "'S", "_", "1", "2", "3", "4", "5", "_a", "_", "_b", "//", "_c", "=+(", "x", "),", "Ab"],
        ),
        (&["tekken"], &["It", "'S", "_", "1", "2", "3", "4", "5", "_a", "_", "_b", "//", "_c", "=+(", "x", "),", "Ab"]),
        (&["smaug-bpe"], &["It", "'S", "_", "123", "45", "_a", "_", "_b", "//", "_c", "=+(", "x", "),", "Ab"]),
        (
            &["deepseek-llm"],
            &["It", "'", "S", "_", "1", "2", "3", "4", "5", "_a", "_", "_b", "/", "/", "_c", "=+(", "x", "),", "Ab"],
        ),
        (
            &["deepseek-coder"],
            &[
                "It", "'", "S", "_", "1", "2", "3", "4", "5", "_a", "_", "_b", "/", "/", "_c", "=+", "(", "x", "),",
                "Ab",
            ],
        ),
        (&["bloom", "poro-chat"], &["It'S", "_12345", "_a", "_", "_b", "//", "_c=+", "(", "x", "),", "Ab"]),
        (&["viking"], &["It'S", "_", "1", "2", "3", "4", "5", "_a", "_", "_b", "//", "_c=+", "(", "x", "),", "Ab"]),
        (
            &["seed-coder"],
            &["It", "'S", "_", "1", "2", "3", "4", "5", "_a", "_", "_b", "//", "_c", "=+(", "x", "),", "Ab"],
        ),
        (&["default"], &["It", "'", "S", "_", "123", "45", "_a", "_", "_b", "//", "_c", "=+(", "x", "),", "Ab"]),
    ];
    let (mut header, json) = shipped();
    for (names, want) in cases {
        for name in names {
            set(&mut header, "pre", Some(Meta::String((*name).into())));
            set(&mut header, "add_bos_token", Some(Meta::Bool(false)));
            assert_eq!(cut(&header, text), want, "{name}");
            // The first name is the one that is written.
            let back = metadata_from(&model_config(), &tokenizer_json(&header).unwrap(), GgmlType::F16, None).unwrap();
            assert_eq!(header_of(back).get("tokenizer.ggml.pre"), Some(&Meta::String(names[0].into())));
        }
    }
    // Without a name, what llama.cpp takes then; Llama 3's texts begin with a token unless the file says otherwise.
    set(&mut header, "pre", None);
    assert_eq!(cut(&header, text), cases[11].1);
    set(&mut header, "pre", Some(Meta::String("llama-bpe".into())));
    set(&mut header, "add_bos_token", None);
    assert_eq!(tokenizer_json(&header).unwrap()["post_processor"]["type"], "TemplateProcessing");
    assert_eq!(ids(&loaded(&tokenizer_json(&header).unwrap()), "a", true)[0], 0);
    assert_eq!(ids(&loaded(&json), "a", true).len(), 1);
    // How the tokenizers of SmolLM and of Llama 3 are spelled in their repositories.
    for (pre, name) in [
        (
            json!({"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": true},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]}),
            "smollm",
        ),
        (json!({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": false}]}), "gpt-2"),
    ] {
        let mut json = json.clone();
        json["pre_tokenizer"] = pre;
        let metadata = header_of(metadata_from(&model_config(), &json, GgmlType::F16, None).unwrap());
        assert_eq!(metadata.get("tokenizer.ggml.pre"), Some(&Meta::String(name.into())));
    }
}

#[test]
fn vocabularies_smaller_than_the_embedding_are_filled() {
    let (_, json) = shipped();
    let mut config = model_config();
    config.insert("vocab_size".into(), json!(4098));
    let header = header_of(metadata_from(&config, &json, GgmlType::F16, None).unwrap());
    let Some(Meta::Array(Array::String(tokens))) = header.get("tokenizer.ggml.tokens") else { panic!("tokens") };
    let Some(Meta::Array(Array::I32(kinds))) = header.get("tokenizer.ggml.token_type") else { panic!("types") };
    assert_eq!(tokens[4096..], ["[PAD4096]", "[PAD4097]"]);
    assert_eq!((kinds[0], kinds[1], &kinds[4096..]), (3, 1, &[5, 5][..]));
}

#[test]
fn lists_that_do_not_fit_are_refused() {
    let (bpe, _) = shipped();
    let (_, spm) = tiny();
    let text = |text: &str| Some(Meta::String(text.to_owned()));
    let texts = |texts: &[&str]| Some(Meta::Array(Array::String(texts.iter().map(|&t| t.to_owned()).collect())));
    let cases = [
        (&bpe, "model", text("bert"), "\"gpt2\" or \"llama\", got \"bert\""),
        (&bpe, "model", None, "got nothing"),
        (&bpe, "tokens", None, "array of strings"),
        (&bpe, "tokens", texts(&[]), "1 to"),
        (&bpe, "token_type", Some(Meta::Array(Array::I32(vec![1]))), "4096 i32"),
        (&bpe, "token_type", Some(Meta::U32(1)), "4096 i32"),
        (&bpe, "pre", text("gpt-9"), "\"gpt-9\" is not known"),
        (&bpe, "merges", None, "array of strings"),
        (&bpe, "merges", texts(&["a b c"]), "two tokens that are one together, got \"a b c\""),
        (&bpe, "merges", texts(&["ab"]), "got \"ab\""),
        (&bpe, "add_bos_token", Some(Meta::U8(1)), "a boolean"),
        (&spm, "bos_token_id", None, "one of 680 tokens"),
        (&spm, "bos_token_id", Some(Meta::U32(680)), "one of 680 tokens"),
        (&spm, "unknown_token_id", Some(Meta::U32(680)), "one of 680 tokens"),
        (&spm, "scores", None, "680 f32"),
        (&spm, "scores", Some(Meta::Array(Array::F32(vec![0.0; 679]))), "680 f32"),
        (&spm, "scores", Some(Meta::Array(Array::F32(vec![f32::NAN; 680]))), "none NaN"),
        (&spm, "remove_extra_whitespaces", Some(Meta::Bool(true)), "changed before"),
    ];
    for (header, key, value, part) in cases {
        let mut header = header.clone();
        set(&mut header, key, value);
        let error = text_of(tokenizer_json(&header));
        assert_names(&error, &[&format!("tokenizer.ggml.{key}"), part]);
    }
    let mut twice = bpe.clone();
    set(&mut twice, "tokens", texts(&["a", "b", "a"]));
    set(&mut twice, "token_type", None);
    assert_names(&text_of(tokenizer_json(&twice)), &["tokenizer.ggml.tokens", "\"a\" as 0 and 2"]);
    // Tokens made to take time: one that is long, and all words of two letters.
    let mut long = spm.clone();
    let Some(Meta::Array(Array::String(mut tokens))) = long.get("tokenizer.ggml.tokens").cloned() else { panic!() };
    tokens[600] = "x".repeat(513);
    set(&mut long, "tokens", Some(Meta::Array(Array::String(tokens))));
    assert_names(&text_of(tokenizer_json(&long)), &["tokenizer.ggml.tokens", "token 600"]);
    let mut dense = spm.clone();
    let runs: Vec<String> = (1..=500).map(|n| "x".repeat(n)).collect();
    set(&mut dense, "token_type", None);
    set(&mut dense, "scores", Some(Meta::Array(Array::F32(vec![0.0; runs.len()]))));
    set(&mut dense, "tokens", Some(Meta::Array(Array::String(runs))));
    assert_names(&text_of(tokenizer_json(&dense)), &["tokenizer.ggml.tokens", "merges a token"]);
}

#[test]
fn tokenizers_that_gguf_cannot_say() {
    let (_, bpe) = shipped();
    let (bytes, tiny) = tiny();
    let (spm, spm_config) = (tokenizer_json(&tiny).unwrap(), config_json(&tiny, &bytes).unwrap());
    let config = model_config();
    let cases = [
        (&bpe, "/model/type", json!("Unigram"), "BPE"),
        (&bpe, "/model/dropout", json!(0.1), "dropout"),
        (&bpe, "/model/vocab", json!([]), "model.vocab"),
        (&bpe, "/model/vocab/!", json!(2), "an id of its own"),
        (&bpe, "/model/vocab/!", json!(-1), "an id of its own"),
        (&bpe, "/model/merges/0", json!("abc"), "merges of two tokens"),
        (&bpe, "/model/merges/0", json!(["a", "b", "c"]), "merges of two tokens"),
        (&bpe, "/model/merges/0", json!([" a", "b"]), "without spaces"),
        (&bpe, "/model/ignore_merges", json!(true), "pre_tokenizer"),
        (&bpe, "/pre_tokenizer", Value::Null, "pre_tokenizer"),
        (&bpe, "/pre_tokenizer/add_prefix_space", json!(true), "pre_tokenizer"),
        (&bpe, "/pre_tokenizer/type", json!("Whitespace"), "pre_tokenizer"),
        (&bpe, "/normalizer", json!({"type": "NFKC"}), "no `normalizer` but NFC"),
        (&bpe, "/added_tokens/0/id", json!(1), "id"),
        (&bpe, "/added_tokens/0/lstrip", json!(true), "lstrip"),
        (&bpe, "/added_tokens/0", json!({}), "`content` and `id`"),
        (&bpe, "/post_processor", json!({"type": "BertProcessing"}), "TemplateProcessing"),
        (&spm, "/post_processor/special_tokens/<s>/ids", json!([2]), "config's bos"),
        (&spm, "/normalizer", Value::Null, "▁"),
        (&spm, "/normalizer/normalizers/0/prepend", json!("_"), "▁"),
        (&spm, "/pre_tokenizer", json!({"type": "Whitespace"}), "no `pre_tokenizer`"),
        (&spm, "/model/unk_token", Value::Null, "unk_token"),
        (&spm, "/added_tokens/0/normalized", json!(true), "normalized"),
        (&spm, "/model/merges/5", json!(["zzz", "q"]), "one together"),
    ];
    for (json, place, value, part) in cases {
        let config = if std::ptr::eq(json, &spm) { &spm_config } else { &config };
        let mut json = json.clone();
        *json.pointer_mut(place).unwrap() = value;
        let result = metadata_from(config, &json, GgmlType::F16, None);
        assert!(matches!(result, Err(Error::Invalid { .. })), "{place}: {result:?}");
        assert_names(&text_of(result), &[part]);
    }
    // Ranks that no scores give: a merge of one token between those of another, and one that is missing.
    let merges = spm["model"]["merges"].as_array().unwrap();
    let whole = |m: &Value| format!("{}{}", m[0].as_str().unwrap(), m[1].as_str().unwrap());
    let split = (1..merges.len()).find(|&i| whole(&merges[i]) == whole(&merges[i - 1])).unwrap();
    for change in [true, false] {
        let mut json = spm.clone();
        let merges = json["model"]["merges"].as_array_mut().unwrap();
        let merge = merges.remove(split);
        if change {
            merges.push(merge);
        }
        let text = text_of(metadata_from(&spm_config, &json, GgmlType::F16, None));
        assert_names(&text, &["merges that scores of tokens can give"]);
    }
}
