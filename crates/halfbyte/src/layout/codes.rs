//! Where files keep the codes of a matrix `[n, k]`; each layout is drawn in a file of its own.
//!
//! `Codes::rows` says what a layout means, code by code; `cpu/pack.rs` knows faster ways to what kernels read.

mod blocks;
mod fpa_intb;
#[doc(hidden)]
pub mod random;
mod words_across;
mod words_along;
mod words_down;

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub use blocks::{BlockForm, Fields, UnpackBlocks};
pub use fpa_intb::{FpaIntB, Pairs};
pub use words_across::{NIBBLES, OUTPUT_OF_NIBBLE};

/// Bits that a code's field takes where codes lie in words of 32 bits: 3 do not divide a word and take 4.
pub const fn field_bits(bits: u32) -> u32 {
    if bits == 3 { 4 } else { bits }
}

/// Unpacks rows `range` of a matrix to one code a byte, `[rows, k]`.
pub type UnpackRows<'a> = dyn Fn(Range<usize>, &mut [u8]) + Send + Sync + 'a;

/// The codes of a matrix `[n, k]` as they lie in a file.
#[derive(Clone)]
pub enum Codes<'a> {
    /// One a byte, `[n, k]`, each with the bits `flip` inverted: 0, or 0x80 where a file holds codes less 128.
    Bytes {
        /// The bytes.
        codes: Cow<'a, [u8]>,
        /// Bits to invert.
        flip: u8,
    },
    /// Of 2, 4 or 8 bits, a stream down each column of words `[k·bits/32, n]`.
    WordsDown(Cow<'a, [u32]>),
    /// Of 2, 4 or 8 bits, a stream along each row of words `[n, ceil(k·bits/32)]`.
    WordsAlong(Cow<'a, [u32]>),
    /// Of 4 bits, eight outputs a word: `[k, n/8]`.
    WordsAcross(Cow<'a, [u32]>),
    /// In blocks beside what they are scaled by, row by row.
    Blocks {
        /// The blocks.
        bytes: Cow<'a, [u8]>,
        /// How they hold codes.
        form: Box<BlockForm>,
    },
    /// Random, of any bits, drawn by whoever packs them: the word of number `first` is the first, see [`random`].
    Random {
        /// Number of the first word.
        first: u64,
        /// Words from a row to the next: of a part as many as the whole has.
        stride: usize,
    },
    /// In any other way.
    Rows(Arc<UnpackRows<'a>>),
}

impl Codes<'_> {
    /// Number of elements that a matrix `[n, k]` takes; None if the layout cannot hold it, or if only its own function
    /// knows.
    pub(super) fn len_of(&self, [n, k]: [usize; 2], bits: u32) -> Option<usize> {
        let whole = |count: usize, each: usize| count.is_multiple_of(each).then(|| count / each);
        let per_word = 32 / bits as usize;
        let words_fit = matches!(bits, 2 | 4 | 8);
        match self {
            Codes::Bytes { .. } => n.checked_mul(k),
            Codes::WordsDown(_) if words_fit => whole(k, per_word)?.checked_mul(n),
            Codes::WordsAlong(_) if words_fit => k.div_ceil(per_word).checked_mul(n),
            Codes::WordsAcross(_) if bits == 4 => whole(n, NIBBLES)?.checked_mul(k),
            Codes::Blocks { form, .. } if form.is_valid(bits) => form.bytes_of_row(k)?.checked_mul(n),
            _ => None,
        }
    }

    /// Number of elements that there are; None if there are none, or only the layout's own function knows.
    pub(super) fn len(&self) -> Option<usize> {
        match self {
            Codes::Bytes { codes: bytes, .. } | Codes::Blocks { bytes, .. } => Some(bytes.len()),
            Codes::WordsDown(words) | Codes::WordsAlong(words) | Codes::WordsAcross(words) => Some(words.len()),
            Codes::Random { .. } | Codes::Rows(_) => None,
        }
    }

    /// The least and the greatest code of `bits` bits that may be there.
    pub(super) fn range(&self, bits: u32) -> (u8, u8) {
        match self {
            Codes::Blocks { form, .. } => form.range(bits),
            _ => (0, ((1u32 << bits) - 1) as u8),
        }
    }

    /// The table that all of them are of.
    pub(super) fn table(&self) -> Option<[u8; 16]> {
        if let Codes::Blocks { form, .. } = self { form.table } else { None }
    }

    /// Unpacks rows `range` of the matrix `[n, k]`, one code a byte, to `out` `[rows, k]`.
    pub(crate) fn rows(&self, range: Range<usize>, [n, k]: [usize; 2], bits: u32, out: &mut [u8]) {
        match self {
            Codes::Bytes { codes, flip } => {
                let codes = &codes[range.start * k..range.end * k];
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = code ^ flip);
            }
            Codes::WordsDown(words) => words_down::rows(words, range, [n, k], bits, out),
            Codes::WordsAlong(words) => words_along::rows(words, range, k, bits, out),
            Codes::WordsAcross(words) => words_across::rows(words, range, [n, k], out),
            Codes::Blocks { bytes, form } => {
                let row = form.bytes_of_row(k).unwrap_or(0);
                form.unpack(&bytes[range.start * row..range.end * row], out);
            }
            Codes::Random { first, stride } => random::rows(*first, *stride, range, k, bits, out),
            Codes::Rows(unpack) => unpack(range, out),
        }
    }
}

impl fmt::Debug for Codes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codes::Bytes { codes, flip } => write!(f, "{} codes a byte, {flip:#x} inverted", codes.len()),
            Codes::WordsDown(words) => write!(f, "{} words down the outputs", words.len()),
            Codes::WordsAlong(words) => write!(f, "{} words along the outputs", words.len()),
            Codes::WordsAcross(words) => write!(f, "{} words across the outputs", words.len()),
            Codes::Blocks { bytes, form } => write!(f, "{} bytes in blocks of {}", bytes.len(), form.bytes),
            Codes::Random { first, .. } => write!(f, "random codes from word {first:#x} on"),
            Codes::Rows(_) => f.write_str("codes in a layout of their own"),
        }
    }
}
