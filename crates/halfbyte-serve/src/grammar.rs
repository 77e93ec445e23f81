//! Answers that follow a grammar: a JSON schema, or the form of a tool call.
//!
//! *Source:* llguidance computes which tokens may come next, within bounds of its own: of the grammar, of the states of its lexer, and
//! of the work for a token.

use halfbyte_llm::tokenizer::TokenBytes;
use halfbyte_llm::{Constraint, Error, Result, Tokenizer};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;

/// States of a lexer, each of which takes some kilobytes.
const MOST_LEXER_STATES: usize = 20_000;

/// Parts of a grammar.
const LARGEST_GRAMMAR: usize = 100_000;

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// JSON that a schema describes.
    Schema(Value),
    /// A grammar in Lark's language, with JSON schemas in it.
    Lark(String),
}

/// Makes constraints for a model's vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    vocab: usize,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("vocab", &self.vocab).finish_non_exhaustive()
    }
}

/// A vocabulary as llguidance knows it.
struct Vocabulary {
    trie: TokTrie,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// The longest tokens that fit: nothing here is forced upon a model by it.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

impl Grammars {
    /// For a tokenizer, and tokens of which each ends a text. Errors: a tokenizer whose tokens stand for no bytes of their own, no token
    /// that ends a text.
    pub fn new(tokenizer: &Tokenizer, end_tokens: &[u32], vocab: usize) -> Result<Self> {
        let Some((&end, more)) = end_tokens.split_first() else {
            return Err(Error::Tokenizer("expected a token that ends a text, got none".to_owned()));
        };
        let tokens = tokenizer.bytes_of_tokens()?;
        let word = |TokenBytes { bytes, special }: &TokenBytes| match special {
            true => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat(),
            // The byte that marks special tokens is in no text.
            false if bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
            false => bytes.clone(),
        };
        // Rows of logits beyond the tokenizer's tokens stand for nothing.
        let mut words: Vec<Vec<u8>> = tokens.iter().map(word).collect();
        words.resize(words.len().max(vocab), Vec::new());
        let info = TokRxInfo::new(words.len() as u32, end);
        let trie = TokTrie::from(&info, &words);
        let trie = if more.is_empty() { trie } else { trie.with_eos_tokens(end_tokens) };
        let env: TokEnv = Arc::new(Vocabulary { trie });
        let refuse = |e: &dyn fmt::Display| Error::Tokenizer(format!("no grammar can be followed: {e}"));
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices()).map_err(|e| refuse(&e))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: MOST_LEXER_STATES,
            max_grammar_size: LARGEST_GRAMMAR,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self { factory, vocab })
    }

    /// What lets only texts of a form come. Errors, as a text: a schema or grammar that is wrong, not served, or beyond its bounds.
    pub fn constraint(&self, form: &Form) -> std::result::Result<Box<dyn Constraint>, String> {
        let grammar = match form {
            Form::Schema(schema) => TopLevelGrammar::from_json_schema(spaced(schema.clone())),
            Form::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let mut matcher = Matcher::new(self.factory.create_parser(grammar));
        match matcher.get_error() {
            Some(why) => Err(why),
            None if matcher.grammar_warnings().is_empty() => Ok(Box::new(Follows { matcher, stopped: false })),
            None => Err(matcher.grammar_warnings().join("; ")),
        }
    }
}

/// A schema whose texts have one space behind commas and colons and no other between their parts: where any number may stand, small models
/// write nothing but spaces.
pub(crate) fn spaced(mut schema: Value) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        let spaces = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        fields.insert("x-guidance".to_owned(), spaces);
    }
    schema
}

fn slices() -> Vec<String> {
    llguidance::earley::SlicedBiasComputer::json_slices()
}

/// A text that follows a grammar so far.
struct Follows {
    matcher: Matcher,
    stopped: bool,
}

impl fmt::Debug for Follows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follows").field("stopped", &self.stopped).finish_non_exhaustive()
    }
}

fn beyond(why: &dyn fmt::Display) -> Error {
    Error::Invalid {
        op: "grammar",
        expected: "one that can be followed within its bounds".to_owned(),
        got: why.to_string(),
    }
}

impl Constraint for Follows {
    fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|e| beyond(&e))?;
        for (token, logit) in (0..).zip(logits) {
            if !mask.get(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn take(&mut self, token: u32) -> Result<bool> {
        self.matcher.consume_token(token).map_err(|e| beyond(&e))?;
        self.stopped = self.matcher.is_stopped();
        Ok(self.stopped)
    }
}
