//! Text in and out: streaming of characters that take several tokens, and files of documents.

use halfbyte_llm::{Error, Tokenizer, eval};
use serde_json::json;
use std::path::PathBuf;

fn real() -> Tokenizer {
    let folder: PathBuf = crate::stdlib();
    Tokenizer::from_folder(&folder).unwrap()
}

/// A tokenizer that spells unknown characters as bytes and marks spaces, as SentencePiece models do.
fn byte_fallback() -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    for byte in 0..256 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(byte));
    }
    for (i, piece) in ["▁", "▁a", "b", "▁b"].iter().enumerate() {
        vocab.insert((*piece).to_owned(), json!(256 + i));
    }
    let tokenizer = json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
                  "vocab": vocab, "merges": []}
    });
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    Tokenizer::from_folder(dir.path()).unwrap()
}

/// Streams ids; returns the pieces.
fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream();
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

#[test]
fn a_character_of_several_tokens_comes_whole() {
    let text = "héllo → 世界 🦀🦀 ﷽ e\u{301} ’tis\n\tdef 𝔘𝔫𝔦𝔠𝔬𝔡𝔢()";
    for tokenizer in [real(), byte_fallback()] {
        let ids: Vec<u32> = match tokenizer.vocab_size() {
            4096 => tokenizer.encode(text).unwrap(),
            _ => text.bytes().map(u32::from).collect(),
        };
        assert!(ids.len() > text.chars().count() / 2);
        let pieces = pieces(&tokenizer, &ids);
        assert!(pieces.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
        assert_eq!(pieces.concat(), text);
        assert_eq!(pieces[ids.len()], "", "nothing was held back");
    }
}

#[test]
fn spaces_between_words_survive_the_stream() {
    let tokenizer = byte_fallback();
    let ids = [257, 258, 259, 256, 257, 0xc3, 0xa9, 259];
    assert_eq!(tokenizer.decode(&ids).unwrap(), "ab b  aé b");
    assert_eq!(pieces(&tokenizer, &ids).concat(), "ab b  aé b");
}

#[test]
fn bytes_that_are_no_text_come_as_replacement_characters_and_never_stall() {
    let tokenizer = real();
    let euro = tokenizer.encode("€").unwrap();
    assert!(euro.len() > 1, "the test needs a character of several tokens");
    let first = euro[0];
    let good = tokenizer.encode("x = 1").unwrap();
    // An unfinished character in the middle, then at the end.
    let ids: Vec<u32> = good.iter().copied().chain([first]).chain(good.iter().copied()).chain([first]).collect();
    let got = pieces(&tokenizer, &ids);
    assert_eq!(got.concat(), tokenizer.decode(&ids).unwrap());
    assert!(got[good.len()].is_empty(), "held back: {got:?}");
    assert_eq!(*got.last().unwrap(), "\u{fffd}");
    // A long run: most of it comes out before the end.
    let ids = vec![first; 100];
    let got = pieces(&tokenizer, &ids);
    assert_eq!(got.concat(), tokenizer.decode(&ids).unwrap());
    assert!(got.last().unwrap().chars().count() <= 17, "{got:?}");
}

#[test]
fn encoding_adds_nothing_and_cuts_nothing() {
    let tokenizer = byte_fallback();
    assert_eq!(tokenizer.encode("bbbbbb").unwrap(), [258; 6], "the truncation that the file asks for is off");
    let tokenizer = real();
    assert_eq!(tokenizer.encode_prompt("", Some(0)).unwrap(), [0]);
    assert!(tokenizer.encode_prompt("", None).unwrap().is_empty());
    let ids = tokenizer.encode_prompt("def ", Some(0)).unwrap();
    assert_eq!(ids[0], 0);
    assert_eq!(ids[1..], tokenizer.encode("def ").unwrap());
    assert_eq!(tokenizer.decode(&ids).unwrap(), "def ", "special tokens are not shown");
}

/// What begins a prompt is what the tokenizer puts there, as in transformers, and else what the configuration names.
#[test]
fn prompts_begin_as_the_tokenizer_says() {
    let here = tempfile::tempdir().unwrap();
    let path = crate::stdlib().join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut begins = |post_processor: serde_json::Value, beside: Option<&str>| {
        tokenizer["post_processor"] = post_processor;
        std::fs::write(here.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let beside_path = here.path().join("tokenizer_config.json");
        match beside {
            Some(text) => std::fs::write(beside_path, text).unwrap(),
            None => drop(std::fs::remove_file(beside_path)),
        }
        let tokenizer = Tokenizer::from_folder(here.path())?;
        assert_eq!(tokenizer.encode("x = 1").unwrap(), tokenizer.encode_within("x = 1", 10).unwrap());
        let of = |bos: Option<u32>| {
            let ids = tokenizer.encode_prompt("x = 1", bos).unwrap();
            ids[..ids.len() - tokenizer.encode("x = 1").unwrap().len()].to_vec()
        };
        Ok::<_, Error>([of(Some(0)), of(None)])
    };
    let special = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let around = |before: &[&str], behind: &[&str]| {
        let single: Vec<_> =
            before.iter().map(|n| special(n)).chain([text.clone()]).chain(behind.iter().map(|n| special(n))).collect();
        json!({"type": "TemplateProcessing", "single": single, "pair": [text, json!({"Sequence": {"id": "B", "type_id": 1}})],
               "special_tokens": {"p": {"id": "p", "ids": [7, 8], "tokens": ["p", "q"]}, "e": {"id": "e", "ids": [9], "tokens": ["e"]}}})
    };
    assert_eq!(begins(around(&["p"], &["e"]), None).unwrap(), [[7, 8], [7, 8]]);
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    for nothing in [around(&[], &[]), around(&[], &["e"]), byte_level] {
        assert_eq!(begins(nothing, Some("{\"add_bos_token\": true}")).unwrap(), [[0u32; 0]; 2]);
    }
    let null = serde_json::Value::Null;
    assert_eq!(begins(null.clone(), None).unwrap(), [vec![0], vec![]]);
    assert_eq!(begins(null.clone(), Some("{\"add_bos_token\": true}")).unwrap(), [vec![0], vec![]]);
    for beside in ["{\"add_bos_token\": false}", "{\"bos_token\": null}"] {
        assert_eq!(begins(null.clone(), Some(beside)).unwrap(), [[0u32; 0]; 2]);
    }
    let error = begins(null, Some("{\"add_bos_token\": 1}")).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json") && error.contains("add_bos_token"), "{error}");
}

#[test]
fn a_broken_tokenizer_is_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Tokenizer::from_folder(dir.path()), Err(Error::Io { .. })));
    std::fs::write(dir.path().join("tokenizer.json"), "{\"version\": 1}").unwrap();
    let error = Tokenizer::from_folder(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
}

#[test]
fn lines_that_are_no_documents_are_numbered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("texts.jsonl");
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        eval::documents(&path)
    };
    assert_eq!(read(b"{\"text\": \"a\\nb\"}\r\n\n  \n{\"id\": 7, \"text\": \"\"}").unwrap(), ["a\nb", ""]);
    assert_eq!(read(b"").unwrap(), [""; 0]);
    // A mark of UTF-8 is skipped at the beginning, and nowhere else.
    assert_eq!(read("\u{feff}{\"text\": \"\u{feff}\"}\n".as_bytes()).unwrap(), ["\u{feff}"]);
    assert_eq!(read("\u{feff}\n{\"text\": \"a\"}".as_bytes()).unwrap(), ["a"]);
    assert!(read("\n\u{feff}{\"text\": \"a\"}".as_bytes()).is_err());
    for bad in
        [&b"{\"text\": \"a\""[..], b"[1]", b"{\"txt\": \"a\"}", b"{\"text\": 3}", b"{\"text\": \"\xff\"}", b"\"text\""]
    {
        let file = [b"{\"text\": \"good\"}\n\n", bad, b"\n{\"text\": \"good\"}"].concat();
        match read(&file) {
            Err(Error::Text { line: 3, path: at, .. }) => assert_eq!(at, path),
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(eval::documents(&dir.path().join("none")), Err(Error::Io { .. })));
}

#[test]
fn a_text_for_two_models_must_mean_the_same_to_both() {
    let folder = crate::stdlib();
    let tokenizer = Tokenizer::from_folder(&folder).unwrap();
    let documents = ["def read(self):".to_owned(), "return 1".to_owned()];
    let own = (&tokenizer, Some(0));
    let stream = eval::shared_token_stream(own, own, &documents).unwrap();
    assert_eq!(stream, eval::token_stream(&tokenizer, &documents, Some(0)).unwrap());

    let refused = |reference: &Tokenizer, bos: Option<u32>| {
        eval::shared_token_stream(own, (reference, bos), &documents).unwrap_err().to_string()
    };
    let error = refused(&tokenizer, None);
    assert!(error.contains("bos_token_id 0 in the model, none in the reference"), "{error}");

    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("tokenizer.json");
    let text = std::fs::read_to_string(folder.join("tokenizer.json")).unwrap();
    let changed = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = serde_json::from_str(&text).unwrap();
        change(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
        Tokenizer::from_file(&path).unwrap()
    };
    // The same tokens, put together by other rules.
    let other = changed(&|json| json["model"]["merges"] = serde_json::json!([]));
    let error = refused(&other, Some(0));
    assert!(error.contains("cut differently from its token 1 on"), "{error}");
    let more = changed(&|json| {
        json["added_tokens"][0]["content"] = "<|end|>".into();
    });
    let error = refused(&more, Some(0));
    assert!(error.contains("\"<|end|>\": unknown in the model"), "{error}");
}
