//! `cargo xtask launches`: whether devices that nobody here has would take what is launched on them.
//!
//! Products, convolutions, layers of experts and models of random shapes and formats are measured by the command line on a driver
//! that runs no kernel and refuses what a device would refuse (`launches/null_driver.c`). Kernels are compiled for each device, so
//! NVRTC is needed. Times and results mean nothing; that nothing is refused and nothing panics does.

mod cases;

use cases::{Case, Random};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    /// Commands to draw.
    #[arg(long, default_value_t = 200)]
    count: usize,
    /// Others than with another number.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The command line to run; built if none is named.
    #[arg(long)]
    program: Option<PathBuf>,
}

/// The longest that a command may take.
const LIMIT: Duration = Duration::from_secs(300);

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let program = match &args.program {
        Some(program) => std::path::absolute(program).map_err(|e| format!("{}: {e}", program.display()))?,
        None => crate::oracles::build(root)?,
    };
    let folder = root.join("target/launches");
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let source = root.join("xtask/src/launches/null_driver.c");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]);
    crate::oracles::output_of(cc.arg(source).arg("-o").arg(folder.join("libcuda.so")))?;

    let mut random = Random(args.seed);
    let cases: Vec<Case> = (0..args.count).map(|_| Case::draw(&mut random)).collect();
    let (next, failed, launches) = (AtomicUsize::new(0), Mutex::new(Vec::new()), AtomicUsize::new(0));
    let work = || {
        while let Some((i, case)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, cases.get(i)?))) {
            match launch(root, &folder, &program, i, case) {
                Ok(number) => drop(launches.fetch_add(number, Ordering::Relaxed)),
                Err(why) => failed.lock().unwrap_or_else(|e| e.into_inner()).push(format!("{case}\n{why}")),
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let failed = failed.into_inner().unwrap_or_else(|e| e.into_inner());
    println!("{} launches of {} commands, {} of which failed", launches.into_inner(), cases.len(), failed.len());
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n\n")) }
}

/// Runs a case. The number of its launches; error: what it said last.
fn launch(root: &Path, folder: &Path, program: &Path, i: usize, case: &Case) -> Result<usize, String> {
    let log = folder.join(format!("{i}.log"));
    let file = File::create(&log).map_err(|e| format!("{}: {e}", log.display()))?;
    let older = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let mut command = Command::new(program);
    command.args(&case.arguments).current_dir(root).stdout(Stdio::null()).stderr(file);
    command.env("LD_LIBRARY_PATH", format!("{}:{older}", folder.display()));
    command.env("HALFBYTE_CACHE", folder.join("cache")).env("NULL_DRIVER", case.device.to_string());
    let status = ended(&mut command)?;
    let said = std::fs::read_to_string(&log).map_err(|e| format!("{}: {e}", log.display()))?;
    // Each process, a rank has one, counts its launches at its end; all else that the driver says is a refusal.
    let words: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("null driver: ")).collect();
    let counts: Option<Vec<usize>> = words.iter().map(|line| line.strip_suffix(" launches")?.parse().ok()).collect();
    match counts.map(|counts| counts.iter().sum::<usize>()) {
        Some(number) if number > 0 && status.success() => Ok(number),
        _ => {
            let last: Vec<&str> = said.lines().rev().filter(|line| !line.starts_with("compiling")).take(12).collect();
            Err(format!("{status}\n{}", last.into_iter().rev().collect::<Vec<_>>().join("\n")))
        }
    }
}

/// How a command ends. Error: it cannot be started, or takes too long.
fn ended(command: &mut Command) -> Result<ExitStatus, String> {
    let mut child = command.spawn().map_err(|e| format!("{command:?}: {e}"))?;
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            return Ok(status);
        }
        if begin.elapsed() > LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("no end after {} s", LIMIT.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
