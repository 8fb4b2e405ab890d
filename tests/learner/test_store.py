import psutil
import torch.distributed as dist

from learner.store import open_store


def test_a_store_listens_at_its_address_alone() -> None:
    store = open_store("127.0.0.1")
    mine = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in mine if address.port == store.port] == ["127.0.0.1"]
    member = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    member.set("name", "value")
    assert store.get("name") == b"value"
