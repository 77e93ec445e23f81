//! Handles: boxes whose addresses callers have.

use crate::status::{Failure, Result};
use std::mem::MaybeUninit;

/// What a caller has given, or the words that there is nothing. `what`: the name of the parameter.
pub(crate) fn given<'a, T: ?Sized>(what: &str, pointer: Option<&'a T>) -> Result<&'a T> {
    pointer.ok_or_else(|| null(what))
}

/// The words for a null pointer.
pub(crate) fn null(what: &str) -> Failure {
    Failure::invalid(what, "a pointer", "null")
}

/// Where a result goes: null as long as there is none. Callers may use a handle in many threads at once, and free it in any.
pub(crate) struct Out<'a, T>(&'a mut MaybeUninit<*mut T>);

impl<'a, T: Send + Sync> Out<'a, T> {
    pub fn new(out: Option<&'a mut MaybeUninit<*mut T>>) -> Result<Self> {
        let out = out.ok_or_else(|| null("out"))?;
        out.write(std::ptr::null_mut());
        Ok(Self(out))
    }

    pub fn give(self, value: T) -> Result<()> {
        self.0.write(Box::into_raw(Box::new(value)));
        Ok(())
    }
}
