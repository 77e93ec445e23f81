//! One error type for the crate, divided by what the caller can do about it.

use std::path::{Path, PathBuf};

/// Everything that can go wrong between a model's folder and its tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The model's configuration is not one that can run.
    #[error("{}, field {field}: expected {expected}, got {got}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Name of the field, with a dot before a nested one.
        field: String,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// The tokenizer cannot be read, or refuses a text.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template cannot be read, refuses a conversation, or needs more than a template may.
    #[error("chat template of {}: {what}", path.display())]
    Chat {
        /// The model.
        path: PathBuf,
        /// What is wrong, with the line.
        what: String,
    },
    /// A tensor of the checkpoint does not fit the configuration.
    #[error("tensor {name}: expected {expected}, got {got}")]
    Weight {
        /// Name of the tensor, or of its layer.
        name: String,
        /// What the configuration asks for.
        expected: String,
        /// What the file holds.
        got: String,
    },
    /// A weight cannot be quantised.
    #[error("tensor {name}: {source}")]
    Quantize {
        /// Name of the tensor's layer.
        name: String,
        /// Why.
        source: halfbyte::Error,
    },
    /// A rank that shares the model has left, is not heard of, or has other files: this one cannot go on.
    #[error("rank {rank} {what}")]
    Rank {
        /// The rank.
        rank: usize,
        /// What is wrong with it.
        what: String,
    },
    /// Rank 0 cannot listen where the others look for it.
    #[error("rank 0 cannot listen at {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A variable that a launcher sets does not say what it must.
    #[error("variable {variable}: expected {expected}, got {got}")]
    Launcher {
        /// Its name.
        variable: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// A prompt without a token.
    #[error("prompt: expected at least one token, got none")]
    EmptyPrompt,
    /// More tokens than the context holds.
    #[error("context: expected at most {limit} tokens, got {got}")]
    ContextFull {
        /// Tokens that fit.
        limit: usize,
        /// Tokens that would be needed.
        got: usize,
    },
    /// A text that cannot fit the context, whatever its tokens are.
    #[error("context: expected a text of at most {limit} tokens, got one of {bytes} bytes, which has at least {least}")]
    TextTooLong {
        /// Tokens that fit.
        limit: usize,
        /// Length of the text.
        bytes: usize,
        /// Tokens that it has at least.
        least: usize,
    },
    /// A token id that the model does not know.
    #[error("token: expected an id below {vocab}, got {id}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// The model computed NaN or infinite logits: its weights hold such values, or overflow.
    #[error("logits: expected finite numbers, got {0}")]
    NotFinite(f32),
    /// A line of a text file is not a document.
    #[error("{}, line {line}: expected {expected}, got {got}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What a line must be.
        expected: &'static str,
        /// What it is.
        got: String,
    },
    /// An argument does not fit the operation: change the call.
    #[error("{op}: expected {expected}, got {got}")]
    Invalid {
        /// The operation that refused.
        op: &'static str,
        /// What it would have taken.
        expected: String,
        /// What it was given.
        got: String,
    },
    /// A text or ids that were read do not fit the operation: change the file.
    #[error("{op}: expected {expected}, got {got}")]
    Input {
        /// The operation that refused.
        op: &'static str,
        /// What it would have taken.
        expected: String,
        /// What it was given.
        got: String,
    },
    /// Work that an earlier run left unfinished cannot be gone on with.
    #[error("{}: expected unfinished work of the same kind, but {what}", path.display())]
    Unfinished {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Another process works in this folder.
    #[error("{}: expected a folder of its own, but another process works there", path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// The scheduler ended before this text did: it failed, or was dropped.
    #[error("text: expected a scheduler that goes on, but it has ended")]
    Stopped,
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
    /// The numbers refused.
    #[error(transparent)]
    Numbers(#[from] halfbyte::Error),
    /// The checkpoint refused.
    #[error(transparent)]
    Checkpoint(#[from] halfbyte_checkpoint::Error),
}

impl Error {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn invalid(op: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Invalid { op, expected: expected.into(), got: got.into() }
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
