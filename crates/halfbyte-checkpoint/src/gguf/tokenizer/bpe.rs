//! Byte-level BPE, "gpt2" in GGUF: merges are listed; how a text is cut before is known by name.

use super::{Parts, Source, Vocab, refuse};
use crate::error::{Error, Result};
use crate::gguf::header::Header;
use crate::gguf::value::{Array, Value as Meta};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

/// How GPT-2 cuts a text; what the tokenizers library's ByteLevel does with `use_regex`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BLOOM: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";
/// The letters of scripts that have cases.
const CASED: &str = "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ\
    ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛ\
    Ꜣ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const CHINESE_AND_KOREAN: &str = r"[一-龥ࠀ-一가-퟿]+";

/// Merges for each token, each of which takes far more memory than its bytes in the file; tokenizers in the field have 2.3
/// at most.
const MERGES_A_TOKEN: usize = 8;

/// A way to cut a text before merging.
struct Pre {
    /// Names of it, the one that is written first.
    names: &'static [&'static str],
    /// What is cut out, one after the other.
    cuts: &'static [&'static str],
    /// Whether a piece that is a token as it is needs no merges.
    ignore_merges: bool,
    /// Whether texts begin with a token for it, if a file does not say.
    add_bos: bool,
}

/// The ways that are known. Source: `llm_tokenizer_bpe` in llama.cpp's llama-vocab.cpp, and the tokenizers of the models
/// it names.
const KNOWN: &[Pre] = &[
    Pre {
        names: &["gpt-2", "phi-2", "mpt", "olmo", "jais", "a.x-4.0", "mellum", "trillion"],
        cuts: &[GPT2],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"],
        cuts: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    Pre { names: &["smaug-bpe"], cuts: &[LLAMA3], ignore_merges: false, add_bos: false },
    Pre {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"],
        cuts: &[DIGIT, GPT2],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"],
        cuts: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["tekken"],
        cuts: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        add_bos: true,
    },
    Pre {
        names: &["gpt-4o", "llama4"],
        cuts: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["deepseek-llm"],
        cuts: &[r"[\r\n]", CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CHINESE_AND_KOREAN, DIGIT],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["deepseek-coder"],
        cuts: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_AND_KOREAN, DIGIT],
        ignore_merges: false,
        add_bos: false,
    },
    Pre { names: &["bloom", "poro-chat", "gpt3-finnish"], cuts: &[BLOOM], ignore_merges: false, add_bos: false },
    Pre { names: &["viking"], cuts: &[BLOOM, DIGIT], ignore_merges: false, add_bos: false },
    Pre {
        names: &["seed-coder"],
        cuts: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["default"],
        cuts: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        ignore_merges: false,
        add_bos: false,
    },
];

pub(super) fn read(header: &Header, vocab: &Vocab<'_>) -> Result<Parts> {
    const PRE: &str = "tokenizer.ggml.pre";
    const MERGES: &str = "tokenizer.ggml.merges";
    let name = header.text(PRE)?.unwrap_or("default");
    let Some(pre) = KNOWN.iter().find(|pre| pre.names.contains(&name)) else {
        let known: Vec<&str> = KNOWN.iter().flat_map(|pre| pre.names).copied().collect();
        let what = format!("key `{PRE}`: the pre-tokenizer \"{name}\" is not known; known are {}", known.join(", "));
        return Err(Error::unsupported(&header.file, what));
    };
    let Some(Meta::Array(Array::String(merges))) = header.get(MERGES) else {
        return Err(header.unexpected(MERGES, "an array of strings"));
    };
    let most = MERGES_A_TOKEN.saturating_mul(vocab.tokens.len());
    if merges.len() > most {
        return Err(header.unexpected(MERGES, &format!("at most {MERGES_A_TOKEN} merges for each token, {most}")));
    }
    let known = |token: &str| vocab.ids.contains_key(token);
    let pair = |merge: &String| match merge.split_once(' ') {
        Some((left, right)) if known(left) && known(right) && known(&[left, right].concat()) => {
            Ok(json!([left, right]))
        }
        _ => {
            let what = format!("key `{MERGES}`: expected two tokens that are one together, got {merge:?}");
            Err(Error::malformed(&header.file, what))
        }
    };
    let merges: Vec<Result<Value>> = merges.par_iter().map(pair).collect();
    let merges: Vec<Value> = merges.into_iter().collect::<Result<_>>()?;
    let model = json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": null,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": false,
        "byte_fallback": false,
        "ignore_merges": pre.ignore_merges,
        "merges": merges,
    });
    Ok(Parts {
        normalizer: Value::Null,
        pre_tokenizer: pre_tokenizer(pre.cuts),
        decoder: byte_level(true, true),
        model: if let Value::Object(model) = model { model } else { Map::new() },
        add_bos: pre.add_bos,
    })
}

/// Cuts as the tokenizers library is told them.
fn pre_tokenizer(cuts: &[&str]) -> Value {
    let split =
        |cut: &&str| json!({"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": false});
    match cuts {
        [GPT2] => byte_level(false, true),
        [before @ .., GPT2] => {
            let steps: Vec<Value> = before.iter().map(split).chain([byte_level(false, true)]).collect();
            json!({"type": "Sequence", "pretokenizers": steps})
        }
        _ => {
            let steps: Vec<Value> = cuts.iter().map(split).chain([byte_level(false, false)]).collect();
            json!({"type": "Sequence", "pretokenizers": steps})
        }
    }
}

fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex})
}

pub(super) fn write(source: &Source<'_>) -> Result<Vec<(&'static str, Meta)>> {
    let normalizer = source.part("normalizer");
    if !normalizer.is_null() && normalizer["type"] != "NFC" {
        return Err(refuse("no `normalizer` but NFC with byte-level BPE", normalizer));
    }
    let ignore_merges = source.model.get("ignore_merges") == Some(&Value::Bool(true));
    let cuts = cuts(source.part("pre_tokenizer"));
    let pre = cuts.and_then(|cuts| KNOWN.iter().find(|pre| pre.cuts == cuts && pre.ignore_merges == ignore_merges));
    let Some(pre) = pre else {
        let expected = format!("a `pre_tokenizer` that GGUF has a name for (with ignore_merges {ignore_merges})");
        return Err(refuse(&expected, source.part("pre_tokenizer")));
    };
    if let Some(merge) = source.merges.iter().find(|pair| pair.iter().any(|t| t.contains(' '))) {
        return Err(refuse("merges of tokens without spaces", &json!(merge)));
    }
    let merges = source.merges.iter().map(|[left, right]| format!("{left} {right}")).collect();
    let [tokens, kinds] = source.tokens_and_kinds();
    Ok(vec![
        ("model", Meta::String("gpt2".into())),
        ("pre", Meta::String(pre.names[0].into())),
        tokens,
        kinds,
        ("merges", Meta::Array(Array::String(merges))),
    ])
}

/// How a pre-tokenizer cuts before it turns bytes into characters, which it must do last; None: in another way.
fn cuts(pre_tokenizer: &Value) -> Option<Vec<&str>> {
    let steps = match pre_tokenizer.get("type")?.as_str()? {
        "Sequence" => pre_tokenizer.get("pretokenizers")?.as_array()?.as_slice(),
        _ => std::slice::from_ref(pre_tokenizer),
    };
    let flag = |step: &Value, field: &str, absent: bool| step.get(field).map_or(Some(absent), Value::as_bool);
    let (last, before) = steps.split_last()?;
    let mut cuts = Vec::with_capacity(steps.len());
    for step in before {
        cuts.push(match step.get("type")?.as_str()? {
            "Split" if step.get("behavior")? == "Isolated" && !flag(step, "invert", false)? => {
                step.pointer("/pattern/Regex")?.as_str()?
            }
            "Digits" if flag(step, "individual_digits", false)? => DIGIT,
            _ => return None,
        });
    }
    if last.get("type")? != "ByteLevel" || flag(last, "add_prefix_space", true)? {
        return None;
    }
    if flag(last, "use_regex", true)? {
        cuts.push(GPT2);
    }
    Some(cuts)
}
