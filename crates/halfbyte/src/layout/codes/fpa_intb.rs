//! The layouts of CUTLASS's fpA_intB kernels (FasterTransformer, TensorRT-LLM, Paddle): codes of 4 or 8 bits, unsigned, with the
//! middle code for zero, in one stream of bytes. A is 16 / bits: 4 or 2.
//!
//! ```text
//! row-major, sm_70        word [j, c] of 32 bits, 4 bits:  31 ………………………………………………………………………………………………………… 0
//!                                                          │8c+7│8c+5│8c+3│8c+1│8c+6│8c+4│8c+2│8c│   outputs of input j
//!                                      8 bits:             │4c+3│4c+1│4c+2│4c│
//!
//! interleaved, from sm_75 [n / A][k / 64][A outputs][64 inputs]: lines of 128 bytes
//!                         the 64 inputs of an output: runs of 8·A, each 8 words of 16 bits:
//!                             field f of word w = input 8·f + w of the run
//! ```
//!
//! In the interleaved order a run of 4-bit codes is 0 8 16 24 1 9 17 25 2 … 31, one of 8 bits 0 8 1 9 2 … 15. Paddle has the
//! same stream for every architecture from sm_75 to sm_100. TensorRT-LLM has others on sm_90 and later, which are not these.
//!
//! Source: `preprocess_weights_for_mixed_gemm` of FasterTransformer, whose four steps (permute the rows, transpose, interleave
//! columns, add the bias and pair up) come to this; `weight_quantize` of paddlepaddle 3.3.1, whose streams the tests read and
//! write bit by bit.

use super::words_across::OUTPUT_OF_NIBBLE;
use crate::error::{Error, Result};
use rayon::prelude::*;
use std::ops::Range;

const OP: &str = "fpa_intb layout";

/// Inputs of an output that lie together in an interleaved line.
const LINE: usize = 64;

/// Words of a run.
const WORDS: usize = 8;

/// Rows of row-major words that are written together: their codes share cache lines.
const TOGETHER: usize = 16;

/// Where codes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FpaIntB {
    /// Row by row of inputs, for Volta (sm_70).
    RowMajor,
    /// Columns interleaved, for Turing (sm_75) and later.
    Interleaved,
}

impl FpaIntB {
    /// The architectures that Paddle names: 10 · major + minor of the compute capability.
    pub const ARCHS: [u32; 8] = [70, 75, 80, 86, 89, 90, 92, 100];

    /// The layout of an architecture. *Error:* another one than [`FpaIntB::ARCHS`].
    pub fn of_arch(arch: u32) -> Result<Self> {
        match arch {
            70 => Ok(FpaIntB::RowMajor),
            _ if Self::ARCHS.contains(&arch) => Ok(FpaIntB::Interleaved),
            _ => Err(Error::invalid(OP, format!("an architecture among {:?}", Self::ARCHS), arch.to_string())),
        }
    }

    /// Bytes of a matrix `[n, k]`. *Errors:* other bits than 4 and 8; an n or k that the layout does not hold: row-major n must
    /// be a multiple of 8 (4 bits) or 4 (8 bits); interleaved k of 64, n of 4 or 2.
    pub fn bytes(self, [n, k]: [usize; 2], bits: u32) -> Result<usize> {
        if !matches!(bits, 4 | 8) {
            return Err(Error::invalid(OP, "codes of 4 or 8 bits", bits.to_string()));
        }
        let outputs = self.outputs(bits);
        if !n.is_multiple_of(outputs) {
            return Err(Error::invalid(OP, format!("outputs that are a multiple of {outputs}"), n.to_string()));
        }
        if self == FpaIntB::Interleaved && !k.is_multiple_of(LINE) {
            return Err(Error::invalid(OP, format!("inputs that are a multiple of {LINE}"), k.to_string()));
        }
        let codes =
            n.checked_mul(k).ok_or_else(|| Error::invalid(OP, "a matrix that fits memory", format!("{n} × {k}")))?;
        // A byte holds outputs or inputs of which there is an even number.
        Ok(codes / (8 / bits as usize))
    }

    /// Outputs that lie together: those of a word, or of a line.
    fn outputs(self, bits: u32) -> usize {
        match self {
            FpaIntB::RowMajor => 32 / bits as usize,
            FpaIntB::Interleaved => 16 / bits as usize,
        }
    }

    /// Codes `[n, k]`, one a byte, to the stream. *Errors:* those of [`FpaIntB::bytes`], another number of codes, a code beyond
    /// the bits.
    pub fn pack(self, codes: &[u8], [n, k]: [usize; 2], bits: u32) -> Result<Vec<u8>> {
        let bytes = self.bytes([n, k], bits)?;
        if codes.len() != n * k {
            return Err(Error::invalid(OP, format!("{n} × {k} codes"), codes.len().to_string()));
        }
        let mut stream = vec![0u8; bytes];
        let most = codes.par_chunks(1 << 16).map(|codes| codes.iter().fold(0, |most, &code| code.max(most))).max();
        if let Some(code) = most.filter(|&code| bits == 4 && code > 15) {
            return Err(Error::invalid(OP, "codes of 4 bits", code.to_string()));
        }
        if stream.is_empty() {
            return Ok(stream);
        }
        match (self, bits) {
            (FpaIntB::RowMajor, _) => {
                let row = n * bits as usize / 8;
                let all = stream.par_chunks_mut(TOGETHER * row).enumerate();
                all.for_each(|(block, rows)| pack_rows(codes, k, block * TOGETHER, bits, row, rows));
            }
            (FpaIntB::Interleaved, 4) => pack_columns::<4>(codes, k, &mut stream),
            (FpaIntB::Interleaved, _) => pack_columns::<2>(codes, k, &mut stream),
        }
        Ok(stream)
    }

    /// The stream to codes `[n, k]`, one a byte. *Errors:* those of [`FpaIntB::bytes`], another number of bytes.
    pub fn unpack(self, stream: &[u8], [n, k]: [usize; 2], bits: u32) -> Result<Vec<u8>> {
        let needed = self.bytes([n, k], bits)?;
        if stream.len() != needed {
            let expected = format!("{needed} bytes for {n} × {k} codes of {bits} bits");
            return Err(Error::invalid(OP, expected, stream.len().to_string()));
        }
        let mut codes = vec![0u8; n * k];
        let rows = self.outputs(bits) * TOGETHER;
        codes.par_chunks_mut(rows.saturating_mul(k).max(1)).enumerate().for_each(|(block, codes)| {
            let first = block * rows;
            self.rows(stream, first..first + codes.len() / k, [n, k], bits, codes);
        });
        Ok(codes)
    }

    /// Outputs `range` of a stream whose length was checked, `[outputs, k]`. Panics if they are not in it, or `out` is no room for them.
    pub fn rows(self, stream: &[u8], range: Range<usize>, [n, k]: [usize; 2], bits: u32, out: &mut [u8]) {
        match (self, bits) {
            (FpaIntB::RowMajor, _) => rows(stream, range, [n, k], bits, out),
            (FpaIntB::Interleaved, 4) => columns::<4>(stream, range, k, out),
            (FpaIntB::Interleaved, _) => columns::<2>(stream, range, k, out),
        }
    }
}

/// The output of a word that field `f` holds.
fn output_of(f: usize, bits: u32) -> usize {
    match bits {
        4 => OUTPUT_OF_NIBBLE[f],
        _ => [0, 2, 1, 3][f],
    }
}

fn rows(stream: &[u8], range: Range<usize>, [n, k]: [usize; 2], bits: u32, out: &mut [u8]) {
    let (fields, mask) = (32 / bits as usize, ((1u32 << bits) - 1) as u8);
    let words = range.start / fields..range.end.div_ceil(fields);
    for (j, row) in stream.chunks_exact((n * bits as usize / 8).max(1)).enumerate() {
        for (c, word) in words.clone().zip(row[words.start * 4..].chunks_exact(4)) {
            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            for f in 0..fields {
                let i = c * fields + output_of(f, bits);
                if range.contains(&i) {
                    out[(i - range.start) * k + j] = (word >> (f as u32 * bits)) as u8 & mask;
                }
            }
        }
    }
}

/// Rows of words from input `first` on.
fn pack_rows(codes: &[u8], k: usize, first: usize, bits: u32, row_bytes: usize, rows: &mut [u8]) {
    let fields = 32 / bits as usize;
    for (c, codes) in codes.chunks_exact(fields * k).enumerate() {
        for (j, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
            let code = |f: usize| u32::from(codes[output_of(f, bits) * k + first + j]) << (f as u32 * bits);
            let word = (0..fields).fold(0, |word, f| word | code(f));
            row[c * 4..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

fn columns<const A: usize>(stream: &[u8], range: Range<usize>, k: usize, out: &mut [u8]) {
    let bits = 16 / A;
    let mask = ((1u32 << bits) - 1) as u8;
    for (i, codes) in range.zip(out.chunks_exact_mut(k.max(1))) {
        let own = LINE * 2 / A;
        let lines = stream[i / A * 2 * k..][..2 * k].chunks_exact(2 * LINE).map(|line| &line[i % A * own..][..own]);
        let runs = lines.flat_map(|line| line.chunks_exact(2 * WORDS));
        for (codes, run) in codes.chunks_exact_mut(WORDS * A).zip(runs) {
            for (w, word) in run.chunks_exact(2).enumerate() {
                let word = u16::from_le_bytes([word[0], word[1]]);
                for f in 0..A {
                    codes[WORDS * f + w] = (word >> (f * bits)) as u8 & mask;
                }
            }
        }
    }
}

fn pack_columns<const A: usize>(codes: &[u8], k: usize, stream: &mut [u8]) {
    let bits = 16 / A;
    stream.par_chunks_exact_mut(2 * k).zip(codes.par_chunks_exact(A * k)).for_each(|(stream, outputs)| {
        for (line, stream) in stream.chunks_exact_mut(2 * LINE).enumerate() {
            let own = |i: usize| outputs[i * k + line * LINE..][..LINE].chunks_exact(WORDS * A);
            for (run, stream) in (0..A).flat_map(own).zip(stream.chunks_exact_mut(2 * WORDS)) {
                for (w, word) in stream.chunks_exact_mut(2).enumerate() {
                    let packed = (0..A).fold(0, |word, f| word | u16::from(run[WORDS * f + w]) << (f * bits));
                    word.copy_from_slice(&packed.to_le_bytes());
                }
            }
        }
    });
}

/// How two signed codes of 4 bits share a byte in a matrix `[k, n]` that is not permuted yet, the first in the low nibble.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairs {
    /// Neighbouring outputs of an input, `[k, n/2]`: what `preprocess_weights_for_mixed_gemm` takes ("row pack").
    Outputs,
    /// Neighbouring inputs of an output, `[k/2, n]`: what Paddle's GPU kernels write on the way ("column pack").
    Inputs,
}

impl Pairs {
    /// Bytes of a matrix. *Errors:* an odd number of outputs or inputs, a matrix beyond memory.
    fn bytes(self, [n, k]: [usize; 2]) -> Result<usize> {
        let (what, pairs) = match self {
            Pairs::Outputs => ("outputs", n),
            Pairs::Inputs => ("inputs", k),
        };
        if !pairs.is_multiple_of(2) {
            return Err(Error::invalid(OP, format!("an even number of {what}"), pairs.to_string()));
        }
        let codes = n.checked_mul(k);
        codes
            .map(|codes| codes / 2)
            .ok_or_else(|| Error::invalid(OP, "a matrix that fits memory", format!("{n} × {k}")))
    }

    /// Byte and shift of the code of output `i` and input `j`.
    fn place(self, n: usize, i: usize, j: usize) -> (usize, u32) {
        match self {
            Pairs::Outputs => ((j * n + i) / 2, 4 * (i % 2) as u32),
            Pairs::Inputs => (j / 2 * n + i, 4 * (j % 2) as u32),
        }
    }

    /// Codes `[n, k]`, one a byte with 8 for zero, to pairs. *Errors:* an odd number of what is paired, another number of codes,
    /// one beyond 4 bits.
    pub fn pack(self, codes: &[u8], [n, k]: [usize; 2]) -> Result<Vec<u8>> {
        let len = self.bytes([n, k])?;
        if codes.len() != n * k {
            return Err(Error::invalid(OP, format!("{n} × {k} codes"), codes.len().to_string()));
        }
        let mut bytes = vec![0u8; len];
        for (at, &code) in codes.iter().enumerate() {
            if code > 15 {
                return Err(Error::invalid(OP, "codes of 4 bits", code.to_string()));
            }
            let (byte, shift) = self.place(n, at / k, at % k);
            bytes[byte] |= (code ^ 8) << shift;
        }
        Ok(bytes)
    }

    /// Pairs to codes `[n, k]`, one a byte with 8 for zero. *Errors:* an odd number of what is paired, another number of bytes.
    pub fn unpack(self, bytes: &[u8], [n, k]: [usize; 2]) -> Result<Vec<u8>> {
        let needed = self.bytes([n, k])?;
        if bytes.len() != needed {
            return Err(Error::invalid(OP, format!("{needed} bytes for {n} × {k} codes"), bytes.len().to_string()));
        }
        let code = |at: usize| {
            let (byte, shift) = self.place(n, at / k, at % k);
            (bytes[byte] >> shift & 15) ^ 8
        };
        Ok((0..n * k).map(code).collect())
    }
}
