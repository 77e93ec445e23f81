//! Panics of foreign code as errors, without a word on standard error.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether this thread runs foreign code.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs foreign code, which panics on tokenizers that contradict themselves: on a table of characters with an index
/// beyond its end, or a token of nothing but what is to be stripped off both its ends. That is an error here, and the hook
/// that reports panics is not told; every other panic comes to it as before. Nothing is left half-changed: the tokenizer is
/// only read, and one that is being made is lost.
pub(super) fn guarded<T>(foreign: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    static SILENCE: Once = Once::new();
    SILENCE.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                report(panic);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(foreign));
    GUARDED.set(outer);
    match outcome {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(format!("it contradicts itself: {text}"))
        }
    }
}
