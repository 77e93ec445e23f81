//! Codes in blocks of bytes, beside the numbers that they are scaled by, which whoever reads the file gives apart. The types of
//! GGUF.
//!
//! ```text
//! row = blocks, one after the other; block = `bytes` bytes for `codes` neighbours along k
//! fields of b bits in runs of r bytes:   byte t of run u = the fields of codes u·c + t, u·c + r + t, u·c + 2r + t, …
//!                                        the first in the lowest bits;  c = 8·r / b codes a run
//! code = (low field | high field << bits of a low one) + add, with the bits `flip` inverted
//!        or, with a table, what it holds at that number of four bits
//! ```

/// Where a part of each code of a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fields {
    /// Byte of the block that the first run begins at.
    pub at: usize,
    /// Bytes of a run: a multiple of 4, or 1 of fields of 1 bit or 4.
    pub run: usize,
    /// Bits of a field: 1, 2, 4, 8; 0: codes have no such part.
    pub bits: u32,
}

impl Fields {
    /// No part.
    pub const NONE: Self = Self { at: 0, run: 4, bits: 0 };

    fn of(self, block: &[u8], code: usize) -> u32 {
        if self.bits == 0 {
            return 0;
        }
        let per_run = 8 * self.run / self.bits as usize;
        let byte = block[self.at + code / per_run * self.run + code % self.run];
        u32::from(byte) >> (self.bits * (code % per_run / self.run) as u32) & ((1 << self.bits) - 1)
    }

    fn is_valid(self, codes: usize, bytes: usize) -> bool {
        let Self { at, run, bits } = self;
        let runs = run.is_multiple_of(4) && run > 0 || run == 1 && matches!(bits, 1 | 4);
        let per_run = if bits == 0 { codes } else { (8 * run).div_ceil(bits as usize) };
        let fits = || at.checked_add(codes.checked_mul(bits as usize)? / 8).filter(|&end| end <= bytes);
        let whole = || runs && codes.is_multiple_of(per_run);
        bits == 0 || matches!(bits, 1 | 2 | 4 | 8) && whole() && fits().is_some()
    }
}

/// Unpacks whole blocks to one code a byte.
pub type UnpackBlocks = fn(&[u8], &mut [u8]);

/// How blocks hold codes.
#[derive(Clone, Copy, Debug)]
pub struct BlockForm {
    /// Codes of a block, a multiple of 4.
    pub codes: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// The lowest bits of codes.
    pub low: Fields,
    /// The bits above these.
    pub high: Fields,
    /// What is added.
    pub add: u8,
    /// Bits to invert.
    pub flip: u8,
    /// Codes of 8 bits that fields of 4 bits stand for; then nothing is added or inverted.
    pub table: Option<[u8; 16]>,
    /// Unpacks whole blocks to one code a byte, as the rest of this says, but faster.
    pub unpack: Option<UnpackBlocks>,
}

impl BlockForm {
    /// Code `at` of a block.
    pub fn code(&self, block: &[u8], at: usize) -> u8 {
        let code = self.low.of(block, at) | self.high.of(block, at) << self.low.bits;
        if let Some(table) = &self.table {
            return table[code as usize & 15];
        }
        (code as u8).wrapping_add(self.add) ^ self.flip
    }

    /// The least and the greatest code that its fields can stand for; of inverted ones any of `bits` bits.
    pub fn range(&self, bits: u32) -> (u8, u8) {
        if let Some(table) = &self.table {
            return table.iter().fold((u8::MAX, 0), |(least, most), &code| (least.min(code), most.max(code)));
        }
        match self.flip {
            0 => (self.add, self.add.saturating_add(((1u32 << (self.low.bits + self.high.bits)) - 1) as u8)),
            _ => (0, ((1u32 << bits) - 1) as u8),
        }
    }

    /// Bytes of a row of `k` codes; None: they are no whole blocks.
    pub fn bytes_of_row(&self, k: usize) -> Option<usize> {
        k.is_multiple_of(self.codes).then(|| k / self.codes).and_then(|blocks| blocks.checked_mul(self.bytes))
    }

    /// Whether it is one that readers take, with codes of at most so many bits.
    pub(super) fn is_valid(&self, bits: u32) -> bool {
        let Self { codes, bytes, low, high, add, flip, table, .. } = *self;
        let fields = low.bits > 0 && [low, high].iter().all(|fields| fields.is_valid(codes, bytes));
        let most = |bits: u32| (1u32 << bits) - 1;
        let whole = codes > 0 && codes.is_multiple_of(4) && bytes > 0;
        // What is inverted must not pass the bits either.
        let in_range = match table {
            None => low.bits + high.bits <= bits && most(low.bits + high.bits) + u32::from(add) <= most(bits),
            Some(_) => bits == 8 && low.bits + high.bits == 4 && add == 0 && flip == 0,
        };
        whole && fields && in_range && u32::from(flip) <= most(bits)
    }

    /// Unpacks whole blocks, one code a byte.
    pub(super) fn unpack(&self, blocks: &[u8], out: &mut [u8]) {
        if let Some(unpack) = self.unpack {
            return unpack(blocks, out);
        }
        for (block, codes) in blocks.chunks_exact(self.bytes).zip(out.chunks_exact_mut(self.codes)) {
            codes.iter_mut().enumerate().for_each(|(at, code)| *code = self.code(block, at));
        }
    }
}
