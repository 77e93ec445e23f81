//! What a weight keeps prepared for the shapes that it is multiplied in, since encoding tensor maps takes longer than a launch.

use crate::error::Result;
use std::sync::{Arc, Mutex, PoisonError};

/// Values that are kept at most.
const MOST: usize = 32;

/// Values by key, the newest last; the oldest goes where there are too many.
#[derive(Debug)]
pub(in crate::cuda) struct Kept<K, V>(Mutex<Vec<(K, Arc<V>)>>);

impl<K, V> Default for Kept<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: PartialEq, V> Kept<K, V> {
    /// The value for a key, out of those kept, or made and kept.
    pub fn get(&self, key: K, make: impl FnOnce(&K) -> Result<V>) -> Result<Arc<V>> {
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, value)) = kept().iter().rev().find(|(other, _)| *other == key) {
            return Ok(value.clone());
        }
        let value = Arc::new(make(&key)?);
        let mut kept = kept();
        if kept.len() == MOST {
            kept.remove(0);
        }
        kept.push((key, value.clone()));
        Ok(value)
    }
}
