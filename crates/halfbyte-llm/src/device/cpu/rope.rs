//! Rotary positions in memory, of short texts and of long ones.

use crate::arch::spec::RopeSpec;
use crate::error::Result;
use halfbyte::cpu::nn;

/// Those of a layer.
#[derive(Debug)]
pub(crate) struct Rope {
    short: nn::Rope,
    /// With the room beyond which a text has them.
    long: Option<(usize, nn::Rope)>,
}

impl Rope {
    pub fn new(spec: &RopeSpec, max_context: usize) -> Result<Self> {
        let rope = |frequencies: &[f64]| nn::Rope::new(frequencies.to_vec(), spec.factor, max_context);
        let long = spec.long.as_ref().map(|long| Ok::<_, halfbyte::Error>((long.beyond, rope(&long.frequencies)?)));
        Ok(Self { short: rope(&spec.frequencies)?, long: long.transpose()? })
    }

    /// Those of a text with room for so many tokens.
    pub fn of(&self, room: usize) -> &nn::Rope {
        self.long.as_ref().filter(|(beyond, _)| room > *beyond).map_or(&self.short, |(_, long)| long)
    }
}
