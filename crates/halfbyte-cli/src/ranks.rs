//! Ranks that share a model: processes, each of which runs the same command.

use crate::failure::{Exit, Failure, Result};
use crate::text;
use halfbyte::cuda::Gpu;
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

    /// What the first of `size` ranks reads; all get it. Errors: those of reading, a rank that has left.
    pub fn share(&self, size: usize, read: impl FnOnce() -> Result<String>) -> Result<String> {
        let comm = self.join(size)?;
        if comm.size() < 2 {
            return read();
        }
        let read = || read().inspect_err(|_| comm.leave("cannot read what all ranks need"));
        let own = if comm.rank() > 0 { String::new() } else { read()? };
        let mut all = comm.all_gather_bytes(own.as_bytes())?;
        // What was a text is one still.
        Ok(String::from_utf8_lossy(&all.swap_remove(0)).into_owned())
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
                .env("LOCAL_RANK", rank.to_string())
                .env("LOCAL_WORLD_SIZE", size.to_string())
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

/// This process among those of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    rank: usize,
    size: usize,
    /// Whether a launcher gave this process one GPU to see, which then is its own.
    has_own: bool,
}

impl Local {
    /// Of so many ranks: as a launcher says by LOCAL_RANK and LOCAL_WORLD_SIZE, or, where all are on one machine, by RANK; and by
    /// CUDA_VISIBLE_DEVICES, if it has one GPU for each process. Error: a variable that is no number.
    pub fn of(ranks: usize) -> Result<Self> {
        Self::from_variables(ranks, |name| std::env::var(name).ok())
    }

    fn from_variables(ranks: usize, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let number = |names: [&str; 2], otherwise| {
            let given = names.iter().find_map(|&name| Some((name, variable(name)?)));
            let Some((name, value)) = given.filter(|_| ranks > 1) else { return Ok(otherwise) };
            value.parse().map_err(|_| {
                Failure::usage(format!("{name} is no number"), format!("\"{value}\""), "let the launcher set it")
            })
        };
        let one = variable("CUDA_VISIBLE_DEVICES").is_some_and(|list| !list.is_empty() && !list.contains(','));
        Ok(Self {
            rank: number(["LOCAL_RANK", "RANK"], 0)?,
            size: number(["LOCAL_WORLD_SIZE", "WORLD_SIZE"], ranks)?,
            has_own: one && variable("RANK").is_some(),
        })
    }

    /// Its GPU, among those that were named for the ranks of this machine, or among all.
    pub fn gpu(self, named: &[u32]) -> Result<u32> {
        let Self { rank, size, has_own } = self;
        match named.get(rank) {
            Some(&number) if named.len() == size => Ok(number),
            None if named.is_empty() && has_own => Ok(0),
            None if named.is_empty() => {
                let there = Gpu::count();
                // One process may be one GPU's though there is none: the driver says why.
                if size > there.max(1) {
                    return Err(Failure::usage(
                        "there are more ranks than GPUs",
                        format!("{size} ranks on this machine, which has {there} GPUs"),
                        "use --device cpu, or let ranks share a GPU, as by --device cuda:0,0",
                    ));
                }
                Ok(rank as u32)
            }
            _ => Err(Failure::usage(
                "--device names another number of GPUs than there are ranks on this machine",
                format!("{} named, {size} ranks", named.len()),
                "name one for each rank, as in --tp 2 --device cuda:0,1",
            )),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_of_a_machine_has_its_gpu() {
        let of = |ranks, variables: &[(&str, &str)]| {
            let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).to_owned());
            Local::from_variables(ranks, find)
        };
        let local = |rank, size| Local { rank, size, has_own: false };
        assert_eq!(of(1, &[("LOCAL_RANK", "3")]).unwrap(), local(0, 1));
        assert_eq!(of(2, &[]).unwrap(), local(0, 2));
        assert_eq!(of(4, &[("RANK", "3"), ("WORLD_SIZE", "4")]).unwrap(), local(3, 4));
        let second = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")];
        assert_eq!(of(8, &second).unwrap(), local(1, 4));
        assert!(of(2, &[("LOCAL_RANK", "one")]).is_err());
        assert_eq!(local(1, 2).gpu(&[4, 2]).unwrap(), 2);
        assert_eq!(local(1, 2).gpu(&[0, 0]).unwrap(), 0);
        for (local, named) in [(local(0, 2), &[0][..]), (local(0, 1), &[0, 1])] {
            assert!(local.gpu(named).is_err(), "{local:?}");
        }
        // A launcher that gives each process its GPU; without one, all see the same.
        let seen = [("RANK", "3"), ("WORLD_SIZE", "4"), ("CUDA_VISIBLE_DEVICES", "3")];
        assert_eq!(of(4, &seen).unwrap().gpu(&[]).unwrap(), 0);
        assert!(!of(4, &seen[2..]).unwrap().has_own && !of(4, &[seen[0], seen[1]]).unwrap().has_own);
        assert!(!of(4, &[seen[0], seen[1], ("CUDA_VISIBLE_DEVICES", "0,1,2,3")]).unwrap().has_own);
    }
}
