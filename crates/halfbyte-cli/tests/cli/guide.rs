//! docs/guide-cli.md: every block of it runs, one after the other, in one folder.

use std::path::Path;
use std::process::Command;

#[test]
#[cfg(unix)]
fn the_guide_runs_as_it_is_written() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let guide = std::fs::read_to_string(root.join("docs/guide-cli.md")).unwrap();
    let blocks: Vec<&str> = guide.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() > 6, "found only {} blocks", blocks.len());
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root.join("models").canonicalize().unwrap(), folder.path().join("models")).unwrap();
    let binary = Path::new(env!("CARGO_BIN_EXE_halfbyte")).parent().unwrap();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([binary.to_owned()].into_iter().chain(std::env::split_paths(&path))).unwrap();
    for block in blocks {
        let mut shell = Command::new("sh");
        let output = shell.args(["-euc", block]).current_dir(folder.path()).env("PATH", &path).output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success(), "{block}\n{}\n{out}\n{err}", output.status);
    }
}
