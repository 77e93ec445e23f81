//! Ranks that share a model: processes, each of which runs the same command.

use crate::failure::{Exit, Failure, Result};
use crate::text;
use halfbyte_llm::comm::{Alone, Comm, Rendezvous, Tcp};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the processes that were started here have to end after this one is done.
const PATIENCE: Duration = Duration::from_secs(5);

/// Those that this process shares a model with, once they were asked for.
#[derive(Debug, Default)]
pub struct Ranks {
    comm: Mutex<Option<Arc<dyn Comm>>>,
    started: Mutex<Vec<Child>>,
}

impl Ranks {
    /// This process among `size`: as a launcher says by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; where WORLD_SIZE is not set, the
    /// others are started on this machine. Ranks but the first print no results.
    pub fn join(&self, size: usize) -> Result<Arc<dyn Comm>> {
        let mut known = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(comm) = known.as_ref() {
            return Ok(comm.clone());
        }
        let comm: Arc<dyn Comm> = match size {
            1 => Arc::new(Alone),
            _ => Arc::new(self.others(size)?),
        };
        if comm.rank() > 0 {
            text::silence();
        }
        Ok(known.insert(comm).clone())
    }

    fn others(&self, size: usize) -> Result<Tcp> {
        match Rendezvous::from_env()? {
            Some(at) if at.size == size => Ok(Tcp::meet(&at)?),
            Some(at) => Err(Failure::usage(
                "--tp and the launcher contradict each other",
                format!("--tp says {size} ranks, WORLD_SIZE {}", at.size),
                "give both the same number",
            )),
            None => self.start(size),
        }
    }

    /// Starts the others.
    fn start(&self, size: usize) -> Result<Tcp> {
        let failed = |why: std::io::Error| {
            Failure::new(
                Exit::Device,
                "the other ranks cannot be started",
                why.to_string(),
                "start them yourself, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set",
            )
        };
        let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let program = std::env::current_exe().map_err(failed)?;
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        for rank in 1..size {
            let child = Command::new(&program)
                .args(std::env::args_os().skip(1))
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", size.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            started.push(child.map_err(failed)?);
        }
        Ok(Tcp::lead(listener, size)?)
    }
}

impl Drop for Ranks {
    /// They see that this one has ended; one that does not is killed.
    fn drop(&mut self) {
        *self.comm.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let until = Instant::now() + PATIENCE;
        for child in self.started.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            while matches!(child.try_wait(), Ok(None)) {
                if Instant::now() > until {
                    drop(child.kill());
                    drop(child.wait());
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
