//! Random numbers that are the same everywhere, for what has to be repeated: drawn tokens, weights of measurements, data of tests.

/// The next 64 bits of a sequence whose state, to begin with a seed, is any number: Steele, Lea and Flood, "Fast splittable
/// pseudorandom number generators" (2014).
pub fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_gives_the_published_sequence() {
        let mut state = 1_234_567;
        let got = [(); 3].map(|()| splitmix64(&mut state));
        assert_eq!(got, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
