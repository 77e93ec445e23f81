//! Which layer an error is about.

use crate::arch::spec::LinearGroup;
use crate::error::Error;
use halfbyte::WeightFormat;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte_checkpoint::{StoredWeight, Weights};

/// The error that ended a block, or what is wrong with the weights of the first layer that cannot be quantised at all:
/// methods see several layers as one, and NaN or infinity in a layer first shows in the inputs of those behind it.
pub(super) fn blame(error: Error, source: &Weights, groups: &[LinearGroup], format: WeightFormat) -> Error {
    if !matches!(error, Error::Quantize { .. } | Error::Numbers(_) | Error::NotFinite(_)) {
        return error;
    }
    let refused = |name: &str| {
        let loaded = source.stored_linear(name).ok()?;
        let StoredWeight::Dense { floats, shape } = &loaded.weight else { return None };
        let refused = rtn(floats.as_floats(), *shape, format, Rtn::default()).err();
        source.release(name);
        refused
    };
    let mut layers = groups.iter().flat_map(|group| &group.layers);
    let found = layers.find_map(|(name, _)| Some((name.clone(), refused(name)?)));
    found.map_or(error, |(name, source)| Error::Quantize { name, source })
}
