//! A rank that this process has started.

use serde_json::Value;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// How long a rank that is told to have ended may take to do so.
const PATIENCE: Duration = Duration::from_secs(1);

/// Bytes of what it wrote last that are kept.
const KEPT: usize = 1 << 14;

#[derive(Debug)]
pub struct Started {
    child: Child,
    /// Reads what it writes to standard error.
    reading: Option<JoinHandle<Vec<u8>>>,
}

impl Started {
    /// Starts it; it reads nothing, and writes to nobody but this process. Error: the system's refusal.
    pub fn spawn(mut command: Command) -> std::io::Result<Self> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        // Where the system gives no thread, the rank writes to a pipe that is closed.
        let said = child.stderr.take();
        let reading = said.and_then(|said| Builder::new().name("halfbyte-rank".into()).spawn(|| last_of(said)).ok());
        Ok(Self { child, reading })
    }

    /// Waits for its end; false: it has not ended.
    pub fn ends_by(&mut self, until: Instant) -> bool {
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Ends it.
    pub fn kill(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }

    /// Why it has ended, in its own words or by the signal that ended it.
    pub fn last_words(&mut self) -> Option<String> {
        if !self.ends_by(Instant::now() + PATIENCE) {
            return None;
        }
        let said = self.reading.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        error_in(&String::from_utf8_lossy(&said)).or_else(|| by_signal(self.child.wait().ok()?))
    }
}

/// The end of what comes.
fn last_of(mut from: impl Read) -> Vec<u8> {
    let (mut kept, mut more) = (Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = from.read(&mut more) {
        kept.extend(&more[..read]);
        let over = kept.len().saturating_sub(KEPT);
        kept.drain(..over);
    }
    kept
}

/// The error that a rank wrote, as lines or as JSON, without help.
fn error_in(said: &str) -> Option<String> {
    let json = said.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok());
    if let Some(error) = json {
        return Some(format!("{}: {}", error["error"].as_str()?, error["cause"].as_str()?));
    }
    let mut lines = said.lines().rev().skip_while(|line| !line.starts_with("cause: "));
    let (cause, error) = (lines.next()?, lines.next()?);
    Some(format!("{}: {}", error.strip_prefix("error: ")?, cause.strip_prefix("cause: ")?))
}

#[cfg(unix)]
fn by_signal(status: ExitStatus) -> Option<String> {
    use std::os::unix::process::ExitStatusExt;
    status.signal().map(|signal| format!("ended by signal {signal}"))
}

#[cfg(not(unix))]
fn by_signal(_: ExitStatus) -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_that_a_rank_wrote_is_found() {
        let lines = "note: slow\nerror: no memory\ncause: 3 GB are missing\nhelp: buy some\n";
        let json =
            "{\"schema\":1,\"error\":\"no memory\",\"cause\":\"3 GB are missing\",\"help\":\"buy some\",\"exit\":4}\n";
        for said in [lines, json] {
            assert_eq!(error_in(said).unwrap(), "no memory: 3 GB are missing");
        }
        assert_eq!(error_in("thread panicked\n"), None);
        let long = [vec![b'x'; 100_000], b"the end".to_vec()].concat();
        let kept = last_of(&*long);
        assert!(kept.len() == KEPT && kept.ends_with(b"the end"));
    }
}
