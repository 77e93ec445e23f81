//! Rotary positions on a device, of short texts and of long ones.

use crate::arch::spec::RopeSpec;
use crate::error::Result;

/// Those of a layer, as a device has them.
#[derive(Debug)]
pub(crate) struct Rope<R> {
    short: R,
    /// With the room beyond which a text has them.
    long: Option<(usize, R)>,
}

impl<R> Rope<R> {
    /// Made of frequencies.
    pub fn new(spec: &RopeSpec, of: impl Fn(&[f64]) -> halfbyte::Result<R>) -> Result<Self> {
        let long = spec.long.as_ref().map(|long| Ok::<_, halfbyte::Error>((long.beyond, of(&long.frequencies)?)));
        Ok(Self { short: of(&spec.frequencies)?, long: long.transpose()? })
    }

    /// Those of a text with room for so many tokens.
    pub fn of(&self, room: usize) -> &R {
        self.long.as_ref().filter(|(beyond, _)| room > *beyond).map_or(&self.short, |(_, long)| long)
    }
}
