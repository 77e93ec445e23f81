//! Signals: Ctrl-C stops at once, or, where something must be put away first, at the next tensor or token. A file beyond the
//! shell's limit ends no program.

use crate::failure::Failure;
use crate::text::write_error;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

static CANCEL: AtomicBool = AtomicBool::new(false);
static COOPERATIVE: AtomicUsize = AtomicUsize::new(0);
static WRITES_FILES: AtomicBool = AtomicBool::new(false);

/// Begins to listen for Ctrl-C, termination and hang-up, which may come while files are written.
pub fn install(writes_files: bool) -> Result<(), ctrlc::Error> {
    WRITES_FILES.store(writes_files, Ordering::SeqCst);
    ctrlc::set_handler(|| {
        let again = CANCEL.swap(true, Ordering::SeqCst);
        if again {
            write_error("\ninterrupted\n");
            std::process::exit(130);
        }
        if COOPERATIVE.load(Ordering::SeqCst) == 0 {
            // Nothing is being written.
            Failure::interrupted().report(std::env::args_os().any(|word| word == "--json"));
            std::process::exit(130);
        }
    })
}

/// Makes a write beyond the limit on the size of files (`ulimit -f`) an error like that of a full disk; the signal would end
/// the program without a word, with half a model left behind. Called before any thread is started, since each takes over what
/// is blocked. Errors: the system's refusal.
pub fn refuse_large_files() -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use nix::sys::signal::{SigSet, Signal};
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGXFSZ);
        signals.thread_block()?;
    }
    Ok(())
}

/// While this lives, an interrupt only sets the flag, and whoever holds it looks at the flag. A second interrupt ends the
/// program at once all the same.
#[derive(Debug)]
pub struct Cooperate(());

/// From now on the flag is looked at.
pub fn cooperate() -> Cooperate {
    COOPERATIVE.fetch_add(1, Ordering::SeqCst);
    Cooperate(())
}

impl Drop for Cooperate {
    fn drop(&mut self) {
        COOPERATIVE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether what is interrupted writes files.
pub fn writes_files() -> bool {
    WRITES_FILES.load(Ordering::Relaxed)
}

/// Whether an interrupt came.
pub fn cancelled() -> bool {
    CANCEL.load(Ordering::Relaxed)
}

/// The flag that an interrupt sets.
pub fn flag() -> &'static AtomicBool {
    &CANCEL
}
