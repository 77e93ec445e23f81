//! The bytes that each token stands for, one by one: what a grammar goes by, and what is told of a token that is a part of a
//! character.

use super::Tokenizer;
use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::HashMap;

/// What a token stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenBytes {
    /// Its bytes in a text; of a special token those of its name.
    pub bytes: Vec<u8>,
    /// Whether it is no part of a text: what begins or ends one, or a turn.
    pub special: bool,
}

/// How a vocabulary spells bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spelling {
    /// A character for each byte, as GPT-2 has it.
    ByteLevel,
    /// Words with `▁` in the place of spaces, and `<0x0A>` for a byte, as SentencePiece has it.
    SentencePiece,
}

impl Tokenizer {
    /// What each token stands for, by id; ids that no token has stand for nothing. Error: a decoder that joins tokens otherwise than
    /// one after the other, as WordPiece does.
    pub fn bytes_of_tokens(&self) -> Result<Vec<TokenBytes>> {
        let spelling = self.spelling()?;
        let bytes_of = byte_level();
        let vocabulary = self.inner.get_vocab(true);
        let added = self.inner.get_added_tokens_decoder();
        let count = vocabulary.values().max().map_or(0, |&id| id as usize + 1);
        let mut tokens = vec![TokenBytes::default(); count];
        for (token, id) in vocabulary {
            tokens[id as usize] = match added.get(&id) {
                Some(added) => TokenBytes { bytes: added.content.clone().into_bytes(), special: added.special },
                None => TokenBytes { bytes: spelling.bytes(&token, &bytes_of), special: false },
            };
        }
        Ok(tokens)
    }

    fn spelling(&self) -> Result<Spelling> {
        let decoder = serde_json::to_value(self.inner.get_decoder()).map_err(|e| Error::Tokenizer(e.to_string()))?;
        let mut steps = vec![&decoder];
        if let Some(decoders) = decoder.get("decoders").and_then(Value::as_array) {
            steps = decoders.iter().collect();
        }
        let spells = |step: &&Value| match step.get("type").and_then(Value::as_str) {
            Some("ByteLevel") => Some(Spelling::ByteLevel),
            Some("Metaspace" | "ByteFallback") => Some(Spelling::SentencePiece),
            Some("Replace") if step.pointer("/pattern/String").and_then(Value::as_str) == Some("▁") => {
                Some(Spelling::SentencePiece)
            }
            _ => None,
        };
        steps.iter().find_map(spells).ok_or_else(|| {
            let of = decoder.get("type").and_then(Value::as_str).unwrap_or("none");
            Error::Tokenizer(format!(
                "expected a decoder that joins tokens as byte-level BPE or SentencePiece do, got {of}"
            ))
        })
    }
}

impl Spelling {
    fn bytes(self, token: &str, bytes_of: &HashMap<char, u8>) -> Vec<u8> {
        match self {
            // A token with any other character stands for itself, all of it.
            Self::ByteLevel => {
                let bytes: Option<Vec<u8>> = token.chars().map(|c| bytes_of.get(&c).copied()).collect();
                bytes.unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Self::SentencePiece => {
                let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                match hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                    Some(byte) => vec![byte],
                    None => token.replace('▁', " ").into_bytes(),
                }
            }
        }
    }
}

/// GPT-2's characters: bytes that print stand for themselves, the others for characters from U+0100 on.
fn byte_level() -> HashMap<char, u8> {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100u32;
    let character = |byte: u8| match prints(byte) {
        true => char::from(byte),
        false => {
            next += 1;
            char::from_u32(next - 1).unwrap_or_default()
        }
    };
    let characters: Vec<char> = (0..=255).map(character).collect();
    characters.into_iter().zip(0..=255).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn bytes_of_tokens_one_after_the_other_are_the_text() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m");
        let tokenizer = Tokenizer::from_folder(&folder).unwrap();
        let tokens = tokenizer.bytes_of_tokens().unwrap();
        assert_eq!(tokens.len(), 4096);
        assert_eq!(tokens.iter().filter(|token| token.special).count(), 1);
        for text in ["def read(path):\n\treturn 'é中🦀\u{7f}\u{0}'\r\n", "  two  spaces\u{a0}¡\u{ad}ÿ"] {
            let ids = tokenizer.encode(text).unwrap();
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokens[id as usize].bytes.clone()).collect();
            assert_eq!(bytes, text.as_bytes());
        }
        assert_eq!(byte_level().len(), 256);
        let bytes = |token: &str| Spelling::ByteLevel.bytes(token, &byte_level());
        assert_eq!((bytes("ĠÃ©"), bytes("Ġ中")), (" é".into(), "Ġ中".into()));
    }

    #[test]
    fn sentencepiece_spells_spaces_and_bytes() {
        let bytes = |token: &str| Spelling::SentencePiece.bytes(token, &HashMap::new());
        assert_eq!((bytes("▁a▁b"), bytes("<0x0A>"), bytes("<0xFF>")), (b" a b".to_vec(), vec![10], vec![255]));
        assert_eq!((bytes("<0xZZ>"), bytes("<0x041>")), (b"<0xZZ>".to_vec(), b"<0x041>".to_vec()));
    }
}
