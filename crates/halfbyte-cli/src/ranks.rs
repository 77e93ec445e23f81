//! Ranks that share a model: processes, each of which runs the same command.

mod given;
mod started;

pub use given::Given;

use crate::failure::{Exit, Failure, Result};
use crate::text::several;
use crate::{interrupt, text};
use halfbyte::cuda::Gpu;
use halfbyte_llm::comm::{Alone, Comm, Rendezvous, Tcp};
use started::Started;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::TcpListener;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the processes that were started here have to end after this one is done.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long an interrupt that came to all ranks may be under way to this one, when another has ended by it.
const SIGNAL: Duration = Duration::from_millis(200);

/// Those that this process shares a model with, once they were asked for.
#[derive(Debug)]
pub struct Ranks {
    given: Given,
    comm: Mutex<Option<Arc<dyn Comm>>>,
    started: Mutex<Vec<Started>>,
}

impl Ranks {
    /// Ranks that must all have been given the same.
    pub fn of(given: Given) -> Self {
        Self { given, comm: Mutex::new(None), started: Mutex::new(Vec::new()) }
    }

    /// This process among `size`: as a launcher says by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; where WORLD_SIZE is not set, the
    /// others are started on this machine. Ranks but the first print no results. Error: ranks that were not given the same command.
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
        let all = known.insert(comm.clone()).all_say("command", &self.given.to_bytes())?;
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(comm),
            Some(rank) => Err(Failure::usage(
                "the ranks were not given the same command",
                Given::difference(&all[0], rank, &all[rank]),
                "start all ranks with the same options; only --device, --threads, --json, --quiet and paths may differ",
            )),
        }
    }

    /// Tells the others of a launcher why this rank does not come to what they wait for.
    pub fn leave(&self, size: usize, why: &str) {
        if size > 1
            && matches!(Rendezvous::from_env(), Ok(Some(at)) if at.size == size)
            && let Ok(comm) = self.join(size)
        {
            comm.leave(why);
        }
    }

    /// Makes sure that all ranks read the same of something: `own` says in words what this one has. Error: a rank that has something else.
    pub fn same(&self, what: &str, own: &str, of: &impl Hash) -> Result<()> {
        let known = self.comm.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(comm) = known.filter(|comm| comm.size() > 1) else { return Ok(()) };
        let mut hash = DefaultHasher::new();
        of.hash(&mut hash);
        let digest = format!("digest {:016x}", hash.finish());
        let all = comm.all_say(what, [&digest, ", ", own].concat().as_bytes())?;
        match all.iter().position(|other| !other.starts_with(&all[0][..digest.len()])) {
            None => Ok(()),
            Some(rank) => {
                let [other, first] = [rank, 0].map(|rank| String::from_utf8_lossy(&all[rank]));
                Err(Failure::new(
                    Exit::Input,
                    format!("the ranks have not the same {what}"),
                    format!("rank {rank} has {other}; rank 0 {first}"),
                    "give all ranks the same files: texts, and a model with its tokenizer",
                ))
            }
        }
    }

    /// A failure with what is known of it besides: that of a rank which was interrupted as this one is; what a rank that was started here
    /// wrote before it ended. If it is this rank's own, the others are told.
    pub fn explain(&self, failure: Failure) -> Failure {
        let Some(rank) = failure.rank() else {
            if let Some(comm) = self.comm.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
                comm.leave(&format!("cannot go on: {}", failure.text()));
            }
            return failure;
        };
        let until = Instant::now() + SIGNAL;
        while Instant::now() < until && !interrupt::cancelled() {
            std::thread::sleep(Duration::from_millis(5));
        }
        if interrupt::cancelled() {
            return Failure::interrupted();
        }
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        match rank.checked_sub(1).and_then(|at| started.get_mut(at)).and_then(Started::last_words) {
            Some(words) => failure.with_cause(&words),
            None => failure,
        }
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
                format!("--tp says {}, WORLD_SIZE {}", several(size, "rank"), at.size),
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
            let mut command = Command::new(&program);
            command
                .args(std::env::args_os().skip(1))
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("LOCAL_WORLD_SIZE", size.to_string())
                .env("WORLD_SIZE", size.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env_remove("TORCHELASTIC_USE_AGENT_STORE");
            started.push(Started::spawn(command).map_err(failed)?);
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
        Self::from_variables(ranks, |name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
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
                        format!("{size} ranks on this machine, which has {}", several(there, "GPU")),
                        "use --device cpu, or let ranks share a GPU, as by --device cuda:0,0",
                    ));
                }
                Ok(rank as u32)
            }
            _ => Err(Failure::usage(
                "--device names another number of GPUs than there are ranks on this machine",
                format!("{} named, {}", named.len(), several(size, "rank")),
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
        for rank in self.started.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            if !rank.ends_by(until) {
                rank.kill();
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
