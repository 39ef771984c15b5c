//! Which I/OAT functions a machine has, and whether a program may use them through VFIO: from /sys and /dev below one root
//! directory, so that tests can lay out machines that we do not have. Nothing is opened or changed. What stands in the way
//! is told in words, with what to do about it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;

use super::ioat;

const PCI_DEVICES: &str = "sys/bus/pci/devices";
const GROUPS: &str = "sys/kernel/iommu_groups";
const DRIVER: &str = "vfio-pci";
/// Members of a group that are bound to these do not hinder anybody.
const HARMLESS: [&str; 3] = [DRIVER, "pci-stub", "pcieport"];
const REMEDY_IOMMU: &str = "enable VT-d in firmware and boot with intel_iommu=on";

/// An I/OAT function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// As `0000:00:04.0`.
    pub address: String,
    /// The processors that have it.
    pub platform: &'static str,
    pub driver: Option<String>,
    /// Its IOMMU group.
    pub group: Option<u32>,
    pub node: Option<u32>,
}

/// Why no device can be used, and what helps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    pub what: String,
    pub remedy: String,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what, self.remedy)
    }
}

impl std::error::Error for Unusable {}

pub(super) fn unusable(what: impl Into<String>, remedy: impl Into<String>) -> Unusable {
    Unusable { what: what.into(), remedy: remedy.into() }
}

fn word(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number(path: &Path) -> Option<u16> {
    u16::from_str_radix(word(path)?.strip_prefix("0x")?, 16).ok()
}

/// The last part of where a link leads.
fn target(link: &Path) -> Option<String> {
    fs::read_link(link).ok()?.file_name()?.to_str().map(str::to_owned)
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// All that there are, by address.
pub fn functions(root: &Path) -> Vec<Function> {
    let devices = root.join(PCI_DEVICES);
    let function = |address: String| {
        let dir = devices.join(&address);
        let platform = ioat::platform(number(&dir.join("vendor"))?, number(&dir.join("device"))?)?;
        Some(Function {
            platform,
            driver: target(&dir.join("driver")),
            group: target(&dir.join("iommu_group")).and_then(|group| group.parse().ok()),
            // The kernel says -1 where there is one node only.
            node: word(&dir.join("numa_node")).and_then(|node| node.parse().ok()),
            address,
        })
    };
    names(&devices).into_iter().filter_map(function).collect()
}

/// Those functions that a program may open; why there is none, otherwise.
pub fn usable(root: &Path) -> Result<Vec<Function>, Unusable> {
    let all = functions(root);
    let Some(first) = all.first() else {
        return Err(unusable(
            "no Intel I/OAT function",
            "needs a Xeon E5 or Scalable before 2023 with I/OAT enabled in firmware",
        ));
    };
    let bound: Vec<&Function> = all.iter().filter(|f| f.driver.as_deref() == Some(DRIVER)).collect();
    if bound.is_empty() {
        let holder = match &first.driver {
            Some(driver) => format!("held by the kernel's driver {driver}"),
            None => "bound to no driver".to_owned(),
        };
        let more = if all.len() > 1 { format!(" and {} more", all.len() - 1) } else { String::new() };
        let what = format!("I/OAT function {}{more} ({}), {holder}", first.address, first.platform);
        let remedy = format!("bind one to vfio-pci: driverctl set-override {} vfio-pci", first.address);
        return Err(unusable(what, remedy));
    }
    if !root.join("dev/vfio/vfio").exists() {
        return Err(unusable("no /dev/vfio/vfio: the kernel has no VFIO", "modprobe vfio-pci"));
    }
    let (mut ready, mut reason) = (Vec::new(), None);
    for function in bound {
        match hindrance(root, function) {
            None => ready.push(function.clone()),
            Some(found) => reason = reason.or(Some(found)),
        }
    }
    match reason {
        Some(reason) if ready.is_empty() => Err(reason),
        _ => Ok(ready),
    }
}

/// What keeps a program from a function that is bound to VFIO.
fn hindrance(root: &Path, function: &Function) -> Option<Unusable> {
    let address = &function.address;
    let Some(group) = function.group else {
        return Some(unusable(format!("{address} is in no IOMMU group: no IOMMU is on"), REMEDY_IOMMU));
    };
    let dir = root.join(GROUPS).join(group.to_string());
    let unsafe_mode = word(&dir.join("name")).is_some_and(|name| name.contains("noiommu"))
        || root.join(format!("dev/vfio/noiommu-{group}")).exists();
    if unsafe_mode {
        // There a program names physical addresses, of pages that it cannot hold where they are.
        let what = format!("{address} is in VFIO's unsafe mode without an IOMMU, which is not used here");
        return Some(unusable(what, REMEDY_IOMMU));
    }
    for member in names(&dir.join("devices")) {
        let driver = target(&root.join(PCI_DEVICES).join(&member).join("driver"));
        if let Some(driver) = driver.filter(|driver| !HARMLESS.contains(&driver.as_str())) {
            let what = format!("IOMMU group {group} is not viable: {member} in it is bound to {driver}");
            let remedy = format!("bind it to vfio-pci as well: driverctl set-override {member} vfio-pci");
            return Some(unusable(what, remedy));
        }
    }
    let node = format!("dev/vfio/{group}");
    if !root.join(&node).exists() {
        return Some(unusable(
            format!("no /{node}, though {address} is bound to vfio-pci"),
            "modprobe vfio-pci",
        ));
    }
    let access = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
    if rustix::fs::access(root.join(&node), access).is_err() {
        let remedy = format!("chown it to the user, or to a group with a udev rule: chown USER /{node}");
        return Some(unusable(format!("/{node} ({address}) is not permitted to this user"), remedy));
    }
    None
}

/// Groups of these functions, each once.
pub(super) fn groups(functions: &[Function]) -> BTreeSet<u32> {
    functions.iter().filter_map(|function| function.group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    /// A machine laid out as files.
    struct Machine(PathBuf);

    impl Machine {
        fn new(name: &str) -> Machine {
            let dir = std::env::temp_dir().join(format!("lodestone-vfio-{}-{name}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Machine(dir)
        }

        fn file(&self, path: &str, text: &str) -> &Machine {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn link(&self, path: &str, to: &str) -> &Machine {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(to, path).unwrap();
            self
        }

        fn device(&self, address: &str, device: &str, driver: Option<&str>, group: Option<u32>) -> &Machine {
            let dir = format!("{PCI_DEVICES}/{address}");
            self.file(&format!("{dir}/vendor"), "0x8086\n").file(&format!("{dir}/device"), device);
            self.file(&format!("{dir}/numa_node"), "1\n");
            if let Some(driver) = driver {
                self.link(&format!("{dir}/driver"), &format!("../../../bus/pci/drivers/{driver}"));
            }
            if let Some(group) = group {
                self.link(&format!("{dir}/iommu_group"), &format!("../../../kernel/iommu_groups/{group}"));
                self.file(&format!("{GROUPS}/{group}/devices/{address}"), "");
            }
            self
        }

        fn refusal(&self) -> String {
            usable(&self.0).unwrap_err().to_string()
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const IOAT: &str = "0x2021\n";

    #[test]
    fn functions_are_known_by_their_numbers() {
        let machine = Machine::new("numbers");
        machine.device("0000:00:04.0", IOAT, Some("ioatdma"), Some(12));
        machine.device("0000:00:1f.0", "0x2916\n", Some("lpc_ich"), Some(13));
        machine.device("0000:80:04.1", "0x0b00\n", None, None);
        let found = functions(&machine.0);
        let addresses: Vec<&str> = found.iter().map(|f| f.address.as_str()).collect();
        assert_eq!(addresses, ["0000:00:04.0", "0000:80:04.1"]);
        assert_eq!((found[0].driver.as_deref(), found[0].group), (Some("ioatdma"), Some(12)));
        assert_eq!((found[1].driver.as_deref(), found[1].group, found[1].node), (None, None, Some(1)));
    }

    #[test]
    fn each_hindrance_is_told_with_its_remedy() {
        let machine = Machine::new("hindrances");
        assert!(machine.refusal().starts_with("no Intel I/OAT function"));
        machine.device("0000:00:04.0", IOAT, Some("ioatdma"), Some(12));
        let said = machine.refusal();
        assert!(said.contains("held by the kernel's driver ioatdma"), "{said}");
        assert!(said.ends_with("driverctl set-override 0000:00:04.0 vfio-pci"), "{said}");

        let machine = Machine::new("unbound");
        machine.device("0000:00:04.0", IOAT, None, Some(12));
        assert!(machine.refusal().contains("bound to no driver"));

        let machine = Machine::new("no-iommu");
        machine.device("0000:00:04.0", IOAT, Some("vfio-pci"), None);
        assert!(machine.refusal().contains("no /dev/vfio/vfio"));
        machine.file("dev/vfio/vfio", "");
        let said = machine.refusal();
        assert!(said.contains("no IOMMU is on") && said.contains("intel_iommu=on"), "{said}");

        let machine = Machine::new("unsafe");
        machine.device("0000:00:04.0", IOAT, Some("vfio-pci"), Some(0)).file("dev/vfio/vfio", "");
        machine.file("dev/vfio/noiommu-0", "");
        assert!(machine.refusal().contains("unsafe mode"));

        let machine = Machine::new("viable");
        machine.device("0000:00:04.0", IOAT, Some("vfio-pci"), Some(12)).file("dev/vfio/vfio", "");
        machine.device("0000:00:04.1", IOAT, Some("ioatdma"), Some(12)).file("dev/vfio/12", "");
        let said = machine.refusal();
        let what = "group 12 is not viable: 0000:00:04.1 in it is bound to ioatdma";
        assert!(said.contains(what) && said.ends_with("set-override 0000:00:04.1 vfio-pci"), "{said}");
    }

    #[test]
    fn a_group_that_may_be_opened_is_usable() {
        let machine = Machine::new("usable");
        machine.device("0000:00:04.0", IOAT, Some("vfio-pci"), Some(12)).file("dev/vfio/vfio", "");
        machine.device("0000:00:03.0", "0x2030", Some("pcieport"), Some(12));
        assert!(machine.refusal().contains("no /dev/vfio/12"));
        machine.file("dev/vfio/12", "");
        // One that cannot be used does not hinder the others.
        machine.device("0000:80:04.0", IOAT, Some("vfio-pci"), Some(40));
        let usable = usable(&machine.0).unwrap();
        assert_eq!(usable.iter().map(|f| f.address.as_str()).collect::<Vec<_>>(), ["0000:00:04.0"]);
        assert_eq!(groups(&usable).into_iter().collect::<Vec<_>>(), [12]);
        if rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: a group that is not permitted: everything is permitted to root");
            return;
        }
        let node = machine.0.join("dev/vfio/12");
        fs::set_permissions(node, fs::Permissions::from_mode(0o000)).unwrap();
        let said = machine.refusal();
        assert!(said.contains("/dev/vfio/12 (0000:00:04.0) is not permitted") && said.contains("chown"));
    }
}
