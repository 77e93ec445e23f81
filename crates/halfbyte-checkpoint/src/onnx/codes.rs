//! Codes of 2, 4 or 8 bits in a row of bytes, in order from the lowest bit up; eight of them at a time.

/// Fills a row of codes from the bytes that hold them.
///
/// Shapes: `bytes` at least `codes.len() · bits / 8`, rounded up; bits 2, 4 or 8.
pub(crate) fn unpack_row(bits: u32, bytes: &[u8], codes: &mut [u8]) {
    match bits {
        2 => unpack::<2>(bytes, codes, |word| {
            let word = (word | word << 24) & 0x0000_00ff_0000_00ff;
            let word = (word | word << 12) & 0x000f_000f_000f_000f;
            (word | word << 6) & 0x0303_0303_0303_0303
        }),
        4 => unpack::<4>(bytes, codes, |word| {
            let word = (word | word << 16) & 0x0000_ffff_0000_ffff;
            let word = (word | word << 8) & 0x00ff_00ff_00ff_00ff;
            (word | word << 4) & 0x0f0f_0f0f_0f0f_0f0f
        }),
        _ => codes.copy_from_slice(&bytes[..codes.len()]),
    }
}

/// Fills the bytes that hold a row of codes; those beyond the codes are left as they are.
///
/// Shapes: as [`unpack_row`].
pub(crate) fn pack_row(bits: u32, codes: &[u8], bytes: &mut [u8]) {
    match bits {
        2 => pack::<2>(codes, bytes, |word| {
            let word = (word | word >> 6) & 0x000f_000f_000f_000f;
            let word = (word | word >> 12) & 0x0000_00ff_0000_00ff;
            word | word >> 24
        }),
        4 => pack::<4>(codes, bytes, |word| {
            let word = (word | word >> 4) & 0x00ff_00ff_00ff_00ff;
            let word = (word | word >> 8) & 0x0000_ffff_0000_ffff;
            word | word >> 16
        }),
        _ => bytes[..codes.len()].copy_from_slice(codes),
    }
}

/// `spread` puts the `8·BITS` lowest bits of a word into its eight bytes.
fn unpack<const BITS: usize>(bytes: &[u8], codes: &mut [u8], spread: impl Fn(u64) -> u64) {
    let (eights, rest) = codes.as_chunks_mut::<8>();
    let (words, tail) = bytes.split_at(eights.len() * BITS);
    for (eight, bytes) in eights.iter_mut().zip(words.as_chunks::<BITS>().0) {
        // A copy of known length, so that the loop becomes vector code.
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(bytes);
        *eight = spread(u64::from_le_bytes(word)).to_le_bytes();
    }
    let used = (rest.len() * BITS).div_ceil(8);
    let mut word = [0; 8];
    word[..used].copy_from_slice(&tail[..used]);
    rest.copy_from_slice(&spread(u64::from_le_bytes(word)).to_le_bytes()[..rest.len()]);
}

/// `gather` puts the `BITS` lowest bits of each byte of a word into its `8·BITS` lowest bits.
fn pack<const BITS: usize>(codes: &[u8], bytes: &mut [u8], gather: impl Fn(u64) -> u64) {
    let (eights, rest) = codes.as_chunks::<8>();
    let (words, tail) = bytes.split_at_mut(eights.len() * BITS);
    for (eight, word) in eights.iter().zip(words.as_chunks_mut::<BITS>().0) {
        word.copy_from_slice(&gather(u64::from_le_bytes(*eight)).to_le_bytes()[..BITS]);
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let used = (rest.len() * BITS).div_ceil(8);
    tail[..used].copy_from_slice(&gather(u64::from_le_bytes(last)).to_le_bytes()[..used]);
}
