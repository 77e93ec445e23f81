//! Answers that follow a grammar: a JSON schema, or the form of a tool call.
//!
//! *Source:* llguidance computes which tokens may come next, within bounds of its own: of the grammar, of the states of its lexer, and
//! of the work for a token.

use crate::error::ApiError;
use crate::schema;
use crate::served::Served;
use crate::tools::{Function, ToolForm};
use halfbyte_llm::tokenizer::TokenBytes;
use halfbyte_llm::{Constraint, Error, Result, Tokenizer};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout_at;

/// States of a lexer, each of which takes some kilobytes. Texts of one request share them.
const MOST_LEXER_STATES: usize = 20_000;

/// Parts of a grammar.
const LARGEST_GRAMMAR: usize = 100_000;

/// Steps of the lexer while a grammar is made: some tenths of a second.
const MOST_FUEL: u64 = 100_000;

/// Steps of the lexer for the mask of one token.
const MOST_FUEL_OF_STEP: u64 = 200_000;

/// Bytes of the stack of a thread that makes grammars or follows them: llguidance descends as deep as [`schema`] lets schemas be.
pub const STACK: usize = 64 << 20;

/// Grammars that are made at once.
static AT_ONCE: Semaphore = Semaphore::const_new(2);

/// The operation that errors of a grammar name.
pub const OP: &str = "grammar";

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// JSON that a schema describes.
    Schema(Value),
    /// A call of one of several functions.
    Call(ToolForm, Vec<Function>),
}

impl Form {
    /// The field of a request that asks for it.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Schema(_) => "response_format",
            Self::Call(..) => "tools",
        }
    }
}

/// Why no grammar is made of a form.
#[derive(Debug)]
struct Refused {
    /// The field that is wrong.
    field: String,
    why: String,
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
            initial_lexer_fuel: MOST_FUEL,
            step_lexer_fuel: MOST_FUEL_OF_STEP,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self { factory, vocab })
    }

    /// Makes the grammar of a form; which function is wrong is looked for until the deadline.
    fn compile(&self, form: &Form, deadline: Instant) -> std::result::Result<Compiled, Refused> {
        let (form, functions) = match form {
            Form::Schema(schema) => {
                let refused = |why| Refused { field: form.field().to_owned(), why };
                return self.of_schema(schema).map_err(refused);
            }
            Form::Call(form, functions) => (form, functions),
        };
        let refused = |function: &Function, why| Refused { field: function.field(), why };
        for function in functions {
            schema::check(&function.parameters).map_err(|why| refused(function, why))?;
        }
        let together = |why| Refused { field: "tools".to_owned(), why: format!("all functions together: {why}") };
        let call = form.call(functions);
        schema::check_together(&call).map_err(together)?;
        self.of_grammar(form.grammar(spaced(call))).map_err(|_| {
            // What it says is of a grammar that no client wrote: which of the schemas it is of, and what it says of that one.
            let mut in_time = functions.iter().take_while(|_| Instant::now() < deadline);
            let alone = in_time.find_map(|function| Some((function, self.of_schema(&function.parameters).err()?)));
            match alone {
                Some((function, why)) => refused(function, why),
                None => together("more than can be followed".to_owned()),
            }
        })
    }

    fn of_schema(&self, schema: &Value) -> std::result::Result<Compiled, String> {
        schema::check(schema)?;
        self.of_grammar(TopLevelGrammar::from_json_schema(spaced(schema.clone())))
    }

    /// Errors, as a text: a grammar that is wrong, not served, beyond its bounds, or without a first token.
    fn of_grammar(&self, grammar: TopLevelGrammar) -> std::result::Result<Compiled, String> {
        let mut matcher = Matcher::new(self.factory.create_parser(grammar));
        if let Some(why) = matcher.get_error() {
            return Err(told(&why));
        }
        let warnings = matcher.grammar_warnings();
        if !warnings.is_empty() {
            return Err(warnings.join("; "));
        }
        matcher.compute_mask_or_eos().map_err(|e| told(&e.to_string()))?;
        Ok(Compiled { matcher })
    }
}

/// What llguidance says of an error, without what it notes for those who work on it.
fn told(why: &str) -> String {
    if why.starts_with("panic") {
        return "it cannot be computed".to_owned();
    }
    if why.contains("NoExtension") {
        return "no text keeps to it".to_owned();
    }
    // Options of its own, which no client has.
    if why.contains("coerce_one_of") {
        return "'oneOf' is served only where its parts are seen to exclude each other; use 'anyOf'".to_owned();
    }
    if why.contains("initial_lexer_fuel") {
        return "it takes more work than is done for a grammar".to_owned();
    }
    let lines: Vec<&str> = why.lines().map(str::trim).take_while(|line| !line.starts_with('<')).collect();
    lines.join(" ")
}

/// A grammar from its beginning on.
pub struct Compiled {
    matcher: Matcher,
}

impl Compiled {
    /// What lets only texts of the form come.
    pub fn constraint(&self) -> Box<dyn Constraint> {
        Box::new(Follows { matcher: self.matcher.clone(), stopped: false })
    }
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiled").finish_non_exhaustive()
    }
}

/// The grammar of a form for a model's vocabulary, made in a thread of its own. Errors: a form that no grammar can be made of, a deadline
/// that passes. The thread goes on behind a deadline or a client that is gone, and holds its place until it has ended.
pub async fn compile(served: &Arc<Served>, form: &Form, deadline: Instant) -> std::result::Result<Compiled, ApiError> {
    let late = |_| ApiError::timeout("The request took too long.");
    let place = timeout_at(deadline.into(), AT_ONCE.acquire()).await.map_err(late)?;
    let place = place.map_err(|e| ApiError::internal(&e))?;
    let (send, made) = oneshot::channel();
    let (served, form) = (served.clone(), form.clone());
    let make = move || {
        let made = match served.grammars() {
            Ok(grammars) => {
                grammars.compile(&form, deadline).map_err(|refused| ApiError::schema(refused.field, &refused.why))
            }
            Err(why) => {
                let message = format!("This model follows no schema: {why}");
                Err(ApiError::field(form.field(), "unsupported_value", message))
            }
        };
        drop(place);
        // Whoever asked may be gone.
        let _ = send.send(made);
    };
    let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK).spawn(make);
    thread.map_err(|e| ApiError::internal(&e))?;
    let made = timeout_at(deadline.into(), made).await.map_err(late)?;
    made.unwrap_or_else(|_| Err(ApiError::internal(&"a thread that makes grammars panicked")))
}

/// A schema whose texts have one space behind commas and colons and no other between their parts: where any number may stand, small models
/// write nothing but spaces. Characters are not written by their numbers (`\u0061`): a name that a schema has could come as another.
fn spaced(mut schema: Value) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        let options = json!({
            "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ", "json_allowed_escapes": "nrbtf\\\"",
        });
        fields.insert("x-guidance".to_owned(), options);
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
    let expected = "one that can be followed within its bounds".to_owned();
    Error::Invalid { op: OP, expected, got: told(&why.to_string()) }
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

#[cfg(test)]
mod tests;
