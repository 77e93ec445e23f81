//! State dicts as PyTorch saves them: `pytorch_model.bin`, `*.pt`, `*.pth`. Nothing of a file is ever run.
//!
//! ```text
//! zip     <name>/data.pkl        a pickle of the state dict; each tensor names a storage by its key
//! (1.6 on) <name>/data/<key>      the bytes of a storage: entries are stored, not compressed, and are read in place
//! legacy  pickle of 0x1950a86a20f9469cfc6c │ pickle of 1001 │ pickle of the system's sizes │ pickle of the state dict
//!         │ pickle of the storages' keys │ for each key: i64 elements, their bytes
//! ```
//!
//! A pickle is a program that may call whatever it names. [`pickle`] knows containers, numbers, texts and the few names that
//! tensors are made of ([`names`]), and refuses all else by name; [`zip`] reads the archive's directory; [`state`] finds the
//! one dict of tensors and holds each tensor against its storage.
//!
//! Source: torch/serialization.py and torch/_utils.py of PyTorch 2.15, whose files the tests read; the opcodes as Python's
//! pickletools lists them; the zip format as APPNOTE.TXT 6.3.10 describes it.

pub(crate) mod files;
mod heap;
mod legacy;
mod names;
mod pickle;
mod state;
mod strided;
mod zip;

pub(crate) use strided::gathered;

use crate::error::Error;
use std::path::Path;

/// Why a file is not read.
#[derive(Debug)]
enum Refusal {
    /// It is not what its format demands.
    Malformed(String),
    /// It asks for more than tensors and containers.
    Asks(String),
}

impl Refusal {
    /// The same, of a part of the file.
    fn of(self, part: &str) -> Self {
        match self {
            Refusal::Malformed(what) => Refusal::Malformed(format!("{part}: {what}")),
            Refusal::Asks(what) => Refusal::Asks(format!("{part}: {what}")),
        }
    }

    fn into_error(self, file: &Path) -> Error {
        match self {
            Refusal::Malformed(what) => Error::malformed(file, what),
            Refusal::Asks(what) => Error::unsupported(file, what),
        }
    }
}

impl From<String> for Refusal {
    fn from(what: String) -> Self {
        Refusal::Malformed(what)
    }
}

/// Text of a file as errors show it: escaped, and cut to a length that fits one.
fn shown(text: &str) -> String {
    const MOST: usize = 120;
    let mut escaped: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().nth(MOST).is_some() {
        escaped.push('…');
    }
    escaped
}
